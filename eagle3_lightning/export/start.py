"""`model.init_from`: training that starts from a draft that exists, ours or another tool's, not from random weights."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3_lightning.checkpoint_files import CheckpointFiles
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import ExportedDraft, check_target, read_export
from eagle3_lightning.export.weights import AGAIN, check_weights
from eagle3_lightning.layers import LayerPlan, default_aux_layers, from_vllm, to_vllm
from eagle3_lightning.target import TargetInfo, load_embeddings, load_lm_head

OPTION = "model.init_from"
_NOT_READ = ("t2d", "mask_hidden", "embed_tokens.weight")


def read_start(path: str, config: DraftConfig, num_layers: int, layers: LayerPlan) -> ExportedDraft:
    """Check that a draft has the shape that training shall go on with; nothing of the target need be there.

    Args:
        path: a directory in the speculators format.
        config: the draft that the run's options describe.
        num_layers: decoder layers of the target.
        layers: what the run captures.

    Raises:
        ConfigError: no such draft, a damaged or a quantized one, or one of another shape or other layers.
    """
    found = read_export(Path(path).expanduser(), OPTION)
    if found.config.get("quantization_config") or found.config["transformer_layer_config"].get("quantization_config"):
        raise ConfigError(OPTION, path, "its weights are quantized", "Start from a draft that is not.")
    check_weights(found, OPTION)
    _check_shape(found, path, config)
    _check_layers(found, path, num_layers, layers)
    return found


def open_start(path: str, config: DraftConfig, target: TargetInfo, layers: LayerPlan) -> ExportedDraft:
    """Check that a draft can be what training starts from.

    Args:
        path: see `read_start`.
        config: see `read_start`.
        target: the run's target.
        layers: see `read_start`.

    Raises:
        ConfigError: see `read_start`, or a draft of another target, or one whose frozen parts were trained.
    """
    draft = read_export(Path(path).expanduser(), OPTION)
    try:
        check_target(draft, target, OPTION)
    except ConfigError as error:
        remedy = "Name a draft of target.path, or its own target there."
        raise ConfigError(OPTION, path, error.problem, remedy) from error
    found = read_start(path, config, target.num_layers, layers)
    _check_frozen(found, path, config, target)
    return found


def load_start(draft: Eagle3Draft, found: ExportedDraft, target: TargetInfo) -> None:
    """Fill a draft, in place: its vocabulary is then that of `found`, and its feature scale stays as it is.

    An export has the feature scale in the columns of `fc.weight`; it is divided out again, so that the draft computes
    what was exported.

    Args:
        draft: of the shape that `open_start` has checked.
        found: what it returned.
        target: whose lm_head a draft has that brings none.
    """
    tensors = _tensors(found)
    d2t = tensors.pop("d2t", None)
    with torch.no_grad():
        if not draft.config.full_vocab:
            assert d2t is not None, "check_weights has looked for it"
            draft.set_vocab(d2t.to(draft.d2t))
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = load_lm_head(target, draft.draft_token_ids.cpu())
        for name, parameter in draft.named_parameters():
            parameter.copy_(tensors[name])
        draft.fc.weight.div_(draft.feature_scale.flatten())


def _tensors(found: ExportedDraft) -> dict[str, Tensor]:
    files = _files(found)
    names = [name for name, *_ in files.headers() if name not in _NOT_READ]
    return {name.replace("midlayer.", "layers.0."): files.load(name) for name in names}


def _files(found: ExportedDraft) -> CheckpointFiles:
    return CheckpointFiles(found.path, str(found.path), option=OPTION, remedy=AGAIN)


def _check_shape(found: ExportedDraft, path: str, config: DraftConfig) -> None:
    try:
        theirs = _draft_options(found.config)
    except (LookupError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(OPTION, path, f"its config.json does not tell its sizes ({error})", AGAIN) from error
    if others := {name: value for name, value in theirs.items() if getattr(config, name) != value}:
        told = ", ".join(
            f"{name} {_said(value)} (here {_said(getattr(config, name))})" for name, value in others.items()
        )
        flags = " ".join(f"--model.draft.{name} {_said(value)}" for name, value in others.items())
        raise ConfigError(OPTION, path, f"it is a draft with {told}", f"Give its own: {flags}.")
    layer = found.config["transformer_layer_config"]
    eps, rope = float(layer["rms_norm_eps"]), _rope(layer)
    if not math.isclose(eps, config.rms_norm_eps, rel_tol=1e-3) or rope != _rope({"rope_parameters": config.rope}):
        raise ConfigError(
            OPTION,
            path,
            f"its rms_norm_eps {eps:g} and rotary parameters {rope} are not the target's, {config.rms_norm_eps:g} and "
            f"{dict(config.rope)}, which a draft is trained with here",
            "Start from another draft, or from none.",
        )


def _draft_options(config: dict[str, Any]) -> dict[str, Any]:
    """What of DraftOptions a config.json fixes, with vLLM's defaults for what it leaves out."""
    layer = config["transformer_layer_config"]
    heads = int(layer["num_attention_heads"])
    windowed = "sliding_attention" in (layer.get("layer_types") or [])
    return {
        "arch": layer.get("model_type", "llama"),
        "num_layers": int(layer["num_hidden_layers"]),
        "draft_vocab_size": int(config.get("draft_vocab_size") or layer["vocab_size"]),
        "intermediate_size": int(layer["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or int(layer["hidden_size"]) // heads),
        "norm_before_residual": bool(config.get("norm_before_residual", True)),
        "norm_before_fc": bool(config.get("norm_before_fc", False)),
        "fc_norm": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "sliding_window": int(layer["sliding_window"]) if windowed else None,
    }


def _rope(layer: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in the newer of the two spellings."""
    rope = layer.get("rope_parameters") or {"rope_theta": layer["rope_theta"], **(layer.get("rope_scaling") or {})}
    return {"rope_type": "default", **{name: value for name, value in rope.items() if value is not None}}


def _said(value: object) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check_layers(found: ExportedDraft, path: str, num_layers: int, layers: LayerPlan) -> None:
    given = found.config.get("eagle_aux_hidden_state_layer_ids") or to_vllm(default_aux_layers(num_layers))
    theirs = from_vllm([int(i) for i in given])
    if theirs != layers.aux:
        raise ConfigError(
            OPTION,
            path,
            f"it reads the outputs of layers {list(theirs)}, and this run makes those of {list(layers.aux)}",
            f"Give its own: --target.layers '{list(theirs)}' (with target.layer_convention at its default).",
        )


def _check_frozen(found: ExportedDraft, path: str, config: DraftConfig, target: TargetInfo) -> None:
    """What is not trained here must be the target's."""
    files = _files(found)
    stored = {name for name, *_ in files.headers()}
    if "embed_tokens.weight" in stored:
        own = load_embeddings(target)
        if not _same(files.load("embed_tokens.weight")[: len(own)], own):
            raise ConfigError(
                OPTION,
                path,
                "its embeddings are not the target's: they were trained, which they are not here",
                "Start from a draft with the target's embeddings.",
            )
    if "lm_head.weight" in stored and not config.train_head:
        ids = torch.arange(config.draft_vocab_size)
        if not config.full_vocab:
            ids = ids + files.load("d2t").long()
        if not _same(files.load("lm_head.weight"), load_lm_head(target, ids)):
            raise ConfigError(
                OPTION, path, "its lm_head is not the target's: it was trained", "Give --model.draft.train_head true."
            )


def _same(stored: Tensor, own: Tensor) -> bool:
    """Whether the draft's matrix is the target's, which an export may have rounded."""
    return torch.equal(stored, own.to(stored.dtype))
