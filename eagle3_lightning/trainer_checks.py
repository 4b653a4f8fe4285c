"""Refuses options of the Trainer that Lightning takes and then divides by, ignores, or refuses in its loop alone."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

from eagle3_lightning.checks import COUNT, NOT_NEGATIVE, Range, check_number
from eagle3_lightning.draft.attention import check_kind
from eagle3_lightning.errors import ConfigError, did_you_mean
from eagle3_lightning.module import Eagle3Module

# Option -> where it must lie, and the default that messages name.
_NUMBERS: dict[str, tuple[Range, Any]] = {
    "accumulate_grad_batches": (COUNT, 1),
    "check_val_every_n_epoch": (COUNT, 1),
    "gradient_clip_val": (NOT_NEGATIVE, None),
    "log_every_n_steps": (COUNT, 10),
    "min_epochs": (NOT_NEGATIVE, None),
    "min_steps": (NOT_NEGATIVE, None),
    "num_sanity_val_steps": (Range(-1), 0),
}
_CHECKPOINT_NUMBERS: dict[str, tuple[Range, Any]] = {
    "every_n_epochs": (NOT_NEGATIVE, None),
    "every_n_train_steps": (NOT_NEGATIVE, None),
    "save_top_k": (Range(-1), 1),
}
# Weights are float32 at the least, so of Lightning's precisions these are left, in all spellings, each with what matrix
# products are computed in. 16-mixed is refused before Lightning sees it, which on a CPU would train in bf16 instead.
_PRECISIONS = {
    **dict.fromkeys(("32-true", "32"), torch.float32),
    **dict.fromkeys(("64-true", "64"), torch.float64),
    **dict.fromkeys(("bf16-mixed", "bf16"), torch.bfloat16),
}
_KNOWN_PACKAGES = ("lightning", "eagle3_lightning")
_OF_EVERY_RUN = ("epoch", "step")  # Lightning's own candidates for a checkpoint's monitor
_ALL_OF_THEM = "Give a whole number of batches, or leave it out for all of them."


def check_fit(trainer: Any) -> None:
    """Refuse what a fit cannot do; of the shape of the run, not of the machine.

    Args:
        trainer: its options, parsed.

    Raises:
        ConfigError: a number that makes no sense, or a run without a step or without an end.
    """
    check_any(trainer)
    for name, (allowed, default) in _NUMBERS.items():
        check_number(f"trainer.{name}", trainer[name], allowed, default)
    if trainer.gradient_clip_algorithm == "value":
        raise ConfigError(
            "trainer.gradient_clip_algorithm",
            "value",
            "gradients are clipped by their global norm",
            "Leave it out, or give norm.",
        )
    _check_batches(trainer)
    _check_end(trainer)
    if trainer.num_nodes > 1:
        raise ConfigError(
            "trainer.num_nodes", trainer.num_nodes, "all ranks share memory with vLLM", "Train on one host."
        )


def check_any(trainer: Any) -> None:
    """Refuse what neither a fit nor a validation can do: a precision, a trainer without callbacks.

    Args:
        trainer: its options, parsed.

    Raises:
        ConfigError: one of them is asked for.
    """
    if trainer.barebones:
        raise ConfigError(
            "trainer.barebones",
            True,
            "a run needs its callbacks",
            "Turn things off one by one, as with trainer.enable_progress_bar.",
        )
    if trainer.precision is not None and str(trainer.precision) not in _PRECISIONS:
        raise ConfigError(
            "trainer.precision",
            trainer.precision,
            "a draft is trained with float32 weights, and of the 16-bit kinds in bfloat16 alone",
            "Use one of 32-true, 64-true, bf16-mixed.",
        )


def check_accelerator(trainer: Any) -> None:
    """Refuse a device that this machine has not got; Lightning's own words do not name the option.

    Args:
        trainer: its options, parsed.

    Raises:
        ConfigError: it is not there.
    """
    name, registry = trainer.accelerator, AcceleratorRegistry
    usable = sorted(each for each in registry.available_accelerators() if registry[each]["accelerator"].is_available())
    gpus = {"cuda", "mps"}
    if name not in (*gpus, "gpu", *registry.available_accelerators()):
        return  # which Lightning says of itself
    if name in usable or (name == "gpu" and gpus.intersection(usable)):
        return
    raise ConfigError(
        "trainer.accelerator",
        name,
        "torch finds no such GPU here" if name in ("gpu", *gpus) else "torch finds no such device here",
        f"Use one of auto, {', '.join(usable)}; `eagle3 doctor` shows what there is.",
    )


def check_checkpoint_numbers(checkpoint: Any) -> None:
    """Refuse numbers of the checkpoint's group, which Lightning refuses without the group's name.

    Args:
        checkpoint: its options, parsed.

    Raises:
        ConfigError: one makes no sense.
    """
    for name, (allowed, default) in _CHECKPOINT_NUMBERS.items():
        check_number(f"checkpoint.{name}", checkpoint[name], allowed, default)


def check_attention(module: Eagle3Module, trainer: Trainer) -> None:
    """Refuse attention that has no kernel where the trainer will run it, which the first step would.

    Raises:
        ConfigError: so it is.
    """
    dtype, device = _PRECISIONS[str(trainer.precision)], trainer.strategy.root_device.type
    check_kind(module.loss.attention, device, dtype, module.draft.config.head_dim)


def check_monitors(trainer: Trainer, validated: Iterable[str]) -> None:
    """Refuse a metric that a callback would look for in vain, which Lightning says only after the first validation.

    Args:
        trainer: its callbacks; beside one that is neither Lightning's nor ours, which may log anything, all pass.
        validated: what is logged at a validation.

    Raises:
        ConfigError: there is no such metric when the callback needs it.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    log_every_n_steps: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    validated = sorted(validated)
    if any(type(callback).__module__.partition(".")[0] not in _KNOWN_PACKAGES for callback in callbacks):
        return
    trained = {f"train/{name.partition('/')[2]}" for name in validated}
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            option, known = "checkpoint.monitor", {*validated, *_OF_EVERY_RUN}
            every = callback._every_n_train_steps
            if every and every % log_every_n_steps == 0:  # it looks when they have just been logged
                known |= trained
        elif isinstance(callback, EarlyStopping) and callback.strict:
            option, known = "trainer.callbacks.EarlyStopping.monitor", set(validated)
        else:
            continue
        if callback.monitor is not None and callback.monitor not in known:
            raise ConfigError(
                option,
                callback.monitor,
                "it is logged in training and may not be there at a validation"
                if callback.monitor in trained
                else "no such metric is logged at a validation",
                f"{did_you_mean(callback.monitor, known)} Use one of {', '.join(validated)}.".lstrip(),
            )


def _check_batches(trainer: Any) -> None:
    """Refuse shares of an epoch, whose number of batches nobody knows: answers have any length."""
    for name in ("limit_train_batches", "overfit_batches", "val_check_interval"):
        value = trainer[name]
        if isinstance(value, float) and value not in (0.0, 1.0):
            raise ConfigError(f"trainer.{name}", value, "an epoch has no number of batches beforehand", _ALL_OF_THEM)
    if isinstance(trainer.val_check_interval, int | float):
        check_number("trainer.val_check_interval", trainer.val_check_interval, COUNT)


def _check_end(trainer: Any) -> None:
    """Refuse a run that trains nothing, or would not end."""
    for name in ("max_steps", "max_epochs", "limit_train_batches"):
        if trainer[name] == 0:
            raise ConfigError(f"trainer.{name}", trainer[name], "nothing would be trained", "Give at least 1.")
    if _seconds(trainer.max_time) <= 0:
        raise ConfigError(
            "trainer.max_time", trainer.max_time, "nothing would be trained", "Give some time, as DD:HH:MM:SS."
        )
    if trainer.max_steps < 0 and trainer.max_epochs in (None, -1) and trainer.max_time is None:
        raise ConfigError(
            "trainer.max_steps",
            trainer.max_steps,
            "the run would never end",
            "Set trainer.max_steps, trainer.max_epochs or trainer.max_time.",
        )


def _seconds(max_time: Any) -> float:
    """Of trainer.max_time, as Lightning reads it; endless where there is none or Lightning will refuse it."""
    try:
        left_s = Timer(max_time).time_remaining()
    except (MisconfigurationException, TypeError, ValueError):
        return math.inf
    return math.inf if left_s is None else left_s
