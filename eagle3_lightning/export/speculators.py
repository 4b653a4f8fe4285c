"""Writes a draft as a directory in the speculators format, which vLLM serves as it is.

The directory is written under another name beside its place, loaded back and compared with the draft in memory, and
only then renamed: whatever goes wrong, a full disk included, an earlier export stays whole.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3_lightning.checks import COUNT, check_number
from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import CONFIG_FILE, PROVENANCE_FILE, WEIGHTS_FILE, serve_command
from eagle3_lightning.export.schema import check_servable, needed_vllm, speculators_config
from eagle3_lightning.export.verify import LogitsCheck, check_logits
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.provenance import git_state, versions
from eagle3_lightning.target import TargetInfo

OPTION = "--out"


@dataclass(frozen=True)
class Export:
    """A finished export.

    Attributes:
        path: the directory.
        check: how near the logits of what was loaded back are to the draft's own.
        serve_command: the shell command that serves it.
    """

    path: Path
    check: LogitsCheck
    serve_command: str


def export_draft(
    draft: Eagle3Draft,
    out: Path,
    *,
    target: TargetInfo,
    layers: LayerPlan,
    target_name: str,
    num_speculative_tokens: int,
    vllm_version: str | None,
    origin: dict[str, Any] | None = None,
) -> Export:
    """Write, load back, compare, rename.

    Args:
        draft: the trained draft, with the target's embeddings in it.
        out: the directory; an earlier export there is replaced.
        target: the target that the draft was trained for.
        layers: the auxiliary layers that it reads.
        target_name: how `vllm serve DIR` shall find the target, a hub id or a path.
        num_speculative_tokens: tokens that `vllm serve DIR` proposes in a round.
        vllm_version: the vLLM that must be able to serve it; None checks nothing.
        origin: further facts for the provenance file, for example the training step.

    Raises:
        ConfigError: flags that this vLLM cannot serve, a place that holds something else, or a disk that is full.
        AssertionError: what was loaded back gives other logits (an error of this project).
    """
    check_number("--num_speculative_tokens", num_speculative_tokens, COUNT)
    if vllm_version is not None:
        check_servable(draft.config, vllm_version)
    out = out.absolute()
    check_place(out)
    config = speculators_config(
        draft.config,
        target,
        layers,
        target_name=target_name,
        num_speculative_tokens=num_speculative_tokens,
        dtype=target.dtype,
    )
    provenance = {
        "target_fingerprint": target.fingerprint,
        "aux_layers": list(layers.aux),
        "needs_vllm": needed_vllm(draft.config),
    }
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        check = _write_checked(draft, partial, config, provenance, origin or {})
        _sync(partial)
        _put_in_place(partial, out)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            OPTION,
            str(out),
            f"it could not be written ({error}); an earlier export there is untouched",
            "Free some space or name another place.",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Export(out, check, serve_command(out, target_name, num_speculative_tokens))


def _write_checked(
    draft: Eagle3Draft, directory: Path, config: dict[str, Any], provenance: dict[str, Any], origin: dict[str, Any]
) -> LogitsCheck:
    """Write all files into a new directory; what was loaded back from it is in the provenance file, too."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    _write(directory / CONFIG_FILE, config)
    weights = directory / WEIGHTS_FILE
    save_file(export_tensors(draft, getattr(torch, config["dtype"])), weights, metadata={"format": "pt"})
    # safetensors makes it readable for its owner alone; the server may run as somebody else.
    weights.chmod((directory / CONFIG_FILE).stat().st_mode)
    check = check_logits(draft, directory)
    facts = {"logits_check": asdict(check), "versions": versions(), "git": git_state()}
    _write(directory / PROVENANCE_FILE, {**provenance, **facts, **origin})
    return check


def export_tensors(draft: Eagle3Draft, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of model.safetensors.

    The feature scale is multiplied into the columns of `fc.weight`. A full vocabulary needs no mapping, and vLLM from
    0.30 on has no parameter to load one into.
    """
    state = {name: tensor.detach().cpu() for name, tensor in draft.state_dict().items()}
    scale = state.pop("feature_scale")
    state["fc.weight"] = state["fc.weight"].float() * scale.float().flatten()
    d2t, t2d = state.pop("d2t"), state.pop("t2d")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state.items()}
    if not draft.config.full_vocab:
        tensors |= {"d2t": d2t.to(torch.int64).contiguous(), "t2d": t2d.to(torch.bool).contiguous()}
    return tensors


def check_place(out: Path) -> None:
    """Refuse to replace anything but an earlier export.

    Raises:
        ConfigError: `out` is a file, or a directory that holds something else.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(OPTION, str(out), "it is a file", "Name a directory.")
    if out.is_dir() and any(out.iterdir()):
        try:
            ours = "speculators_model_type" in json.loads((out / CONFIG_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            ours = False
        if not ours:
            raise ConfigError(
                OPTION, str(out), "it exists, is not empty and is no earlier export", "Name a new directory."
            )


def portable_name(target: TargetInfo) -> str:
    """The name to write for a target that has none for serving: a hub id as it is, a directory by its full path."""
    return str(target.path) if Path(target.name).expanduser().is_dir() else target.name


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _sync(directory: Path) -> None:
    """Have everything on the disk before the rename makes it visible."""
    for path in (*directory.iterdir(), directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _put_in_place(partial: Path, out: Path) -> None:
    """Rename; a directory cannot be renamed over another, so the earlier one steps aside and comes back on failure."""
    if not out.exists():
        partial.rename(out)
        return
    aside = out.with_name(f".{out.name}.previous-{os.getpid()}")
    out.rename(aside)
    try:
        partial.rename(out)
    except OSError:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)
