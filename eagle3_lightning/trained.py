"""A trained module out of a checkpoint, for export and analysis."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from eagle3_lightning.checkpoints import REMEDY, read_checkpoint, reason
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions


def load_module(ckpt: Path, target: TargetOptions | None = None) -> Eagle3Module:
    """A trained module on the CPU, without a Trainer, for export and analysis.

    Args:
        ckpt: a Lightning checkpoint.
        target: where the target lies now; None takes what the checkpoint says.

    Raises:
        ConfigError: no such file, a file of another kind, or a target that is not the checkpoint's.
    """
    return module_of(read_checkpoint(ckpt), ckpt, target)


def module_of(saved: dict[str, Any], ckpt: Path, target: TargetOptions | None = None) -> Eagle3Module:
    """The same of a checkpoint that has been read.

    Args:
        saved: what it holds.
        ckpt: where it lies, for messages.
        target: see `load_module`.

    Raises:
        ConfigError: see `load_module`.
    """
    try:
        hparams, state = saved["hyper_parameters"], saved["state_dict"]
        options = (
            target or _from_dict(TargetOptions, hparams["target"]),
            _from_dict(DraftOptions, hparams["draft"]),
            _from_dict(LossOptions, hparams["loss"]),
            _from_dict(OptimOptions, hparams["optim"]),
        )
    except ConfigError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"its options or weights are missing or odd ({reason(error)})"
        raise ConfigError("--ckpt", str(ckpt), problem, REMEDY) from error
    try:
        module = Eagle3Module(*options)
        module.on_load_checkpoint(saved)
    except ConfigError as error:
        raise _named_as_here(error, ckpt, target) from error
    try:
        module.load_state_dict(state)
    except (RuntimeError, KeyError, TypeError, AttributeError) as error:
        problem = f"its weights do not fit the draft ({reason(error)})"
        raise ConfigError("--ckpt", str(ckpt), problem, REMEDY) from error
    module.load_target()
    return module.eval()


def _named_as_here(error: ConfigError, ckpt: Path, target: TargetOptions | None) -> ConfigError:
    """What is wrong with the target or the checkpoint, under the options of a command that starts no run."""
    if error.option == "target.path" and target is None:
        problem = f"its target {error.value!r}: {error.problem}"
        return ConfigError("--ckpt", str(ckpt), problem, "Say where the target is with --target.")
    if error.option == "target.path":
        return ConfigError("--target", error.value, error.problem, error.remedy)
    if error.option == "ckpt_path":
        if target is None:
            return ConfigError("--ckpt", str(ckpt), error.problem, error.remedy)
        return ConfigError("--target", target.path, f"{error.problem}: {error.value}", error.remedy)
    return error


def _from_dict(cls: Any, values: dict[str, Any]) -> Any:
    if unknown := values.keys() - {f.name for f in fields(cls)}:
        raise ValueError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    return cls(**{k: tuple(v) if k == "betas" else v for k, v in values.items()})
