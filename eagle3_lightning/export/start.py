"""`model.init_from`: training that starts from a draft that exists, ours or another tool's, not from random weights."""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from eagle3_lightning.checkpoint_files import CheckpointFiles
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import WEIGHTS_FILE, ExportedDraft, check_target, read_export
from eagle3_lightning.export.weights import AGAIN, check_weights
from eagle3_lightning.layers import LayerPlan, default_aux_layers, from_vllm, plan_layers, to_vllm
from eagle3_lightning.target import TargetInfo, load_embeddings, load_lm_head, rope_parameters

OPTION = "model.init_from"
ANOTHER = "Start from another draft, or from none."
_NOT_READ = ("t2d", "mask_hidden")
_ODD = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError)  # what an odd config.json makes of itself


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
    found = read_export(_directory(path), OPTION)
    _check_config(found, path, config, num_layers, layers)
    return found


def open_start(path: str, config: DraftConfig, target: TargetInfo, layers: LayerPlan) -> ExportedDraft:
    """Check that a draft can be what training starts from.

    Args:
        path: see `read_start`.
        config: see `read_start`.
        target: the run's target.
        layers: see `read_start`.

    Raises:
        ConfigError: see `read_start`; a draft of another target, weights that are not finite or not in a draft of this
            project, a vocabulary that is none, or frozen parts that were trained.
    """
    found = read_export(_directory(path), OPTION)
    check_target(found, target, OPTION, "Name a draft of target.path, or its own target there.")
    _check_config(found, path, config, target.num_layers, layers)
    tensors = _tensors(found, path)
    _check_tensors(path, tensors, config)
    _check_frozen(path, tensors, config, target)
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
    tensors = _tensors(found, str(found.path))
    with torch.no_grad():
        if not draft.config.full_vocab:
            draft.set_vocab(tensors["d2t"].to(draft.d2t))
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = load_lm_head(target, draft.draft_token_ids.cpu())
        for name, parameter in draft.named_parameters():
            parameter.copy_(tensors[name])
        draft.fc.weight.div_(draft.feature_scale.flatten())


def _check_config(found: ExportedDraft, path: str, config: DraftConfig, num_layers: int, layers: LayerPlan) -> None:
    if found.config.get("quantization_config") or found.config["transformer_layer_config"].get("quantization_config"):
        raise ConfigError(OPTION, path, "its weights are quantized", "Start from a draft that is not.")
    if len(list(found.path.glob("*.safetensors"))) > 1 and not (found.path / f"{WEIGHTS_FILE}.index.json").is_file():
        problem = "it holds several safetensors and no index that says which are the draft's"
        raise ConfigError(OPTION, path, problem, AGAIN)
    try:
        check_weights(found, OPTION)
        theirs, constants = _draft_options(found.config), _constants(found.config)
        ids = found.config.get("eagle_aux_hidden_state_layer_ids") or to_vllm(default_aux_layers(num_layers))
        aux = from_vllm([int(i) for i in ids])
    except ConfigError:
        raise
    except _ODD as error:
        raise ConfigError(OPTION, path, f"its config.json cannot be used ({error})", ANOTHER) from error
    _check_shape(path, theirs, config)
    _check_constants(path, constants, config)
    _check_layers(path, aux, num_layers, layers)


def _directory(path: str) -> Path:
    if not path.strip():
        raise ConfigError(OPTION, path, "it is empty", "Name the directory of a draft, or leave it out.")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(OPTION, path, str(error), "Name the directory of a draft.") from error


def _tensors(found: ExportedDraft, path: str) -> dict[str, Tensor]:
    """All tensors by the names that they have here; memory-mapped."""
    files = CheckpointFiles(found.path, path, option=OPTION, remedy=AGAIN)
    try:
        loaded = [(name, files.load(name)) for name, *_ in files.headers() if name not in _NOT_READ]
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ConfigError(OPTION, path, f"its weights cannot be read ({error})", AGAIN) from error
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in loaded}
    if len(tensors) < len(loaded):
        raise ConfigError(OPTION, path, "its first layer is there under two names, layers.0 and midlayer", ANOTHER)
    return tensors


def _draft_options(config: dict[str, Any]) -> dict[str, Any]:
    """What of DraftOptions a config.json fixes, with vLLM's defaults for what it leaves out."""
    layer = config["transformer_layer_config"]
    heads, num_layers = int(layer["num_attention_heads"]), int(layer["num_hidden_layers"])
    flags = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False}
    given = {name: config.get(name, default) for name, default in flags.items()}
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} = {value!r} is neither true nor false")
    return {
        "arch": layer.get("model_type", "llama"),
        "num_layers": num_layers,
        "draft_vocab_size": int(config.get("draft_vocab_size") or layer["vocab_size"]),
        "intermediate_size": int(layer["intermediate_size"]),
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or int(layer["hidden_size"]) // heads),
        **given,
        "sliding_window": _window(layer, num_layers),
    }


def _window(layer: dict[str, Any], num_layers: int) -> int | None:
    """The sliding window of all layers; None if all of them see everything."""
    kinds = layer.get("layer_types")
    if kinds is None:
        return None
    if kinds not in ([kind] * num_layers for kind in ("full_attention", "sliding_attention")):
        raise ValueError(f"layer_types = {kinds!r} is not one kind of attention for all {num_layers} layers")
    if kinds[0] == "full_attention":
        return None
    if (window := int(layer["sliding_window"])) < 1:
        raise ValueError(f"sliding_window = {window}")
    return window


def _constants(config: dict[str, Any]) -> dict[str, Any]:
    """What a draft has in common with its target here, and no option changes."""
    layer = config["transformer_layer_config"]
    for name in ("attention_bias", "mlp_bias"):
        if layer.get(name):
            raise ValueError(f"{name}: a draft has no biases here")
    if (act := layer.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act = {act!r}, not silu")
    return {
        "hidden_size": int(layer["hidden_size"]),
        "vocab_size": int(layer["vocab_size"]),
        "rms_norm_eps": float(layer["rms_norm_eps"]),
        "rope": {k: v for k, v in rope_parameters(layer).items() if v is not None},
    }


def _check_shape(path: str, theirs: dict[str, Any], config: DraftConfig) -> None:
    others = {name: value for name, value in theirs.items() if getattr(config, name) != value}
    if not others:
        return
    told = ", ".join(f"{name} {_said(their)} (here {_said(getattr(config, name))})" for name, their in others.items())
    flags = " ".join(f"--model.draft.{name} {_said(value)}" for name, value in others.items())
    known = theirs["arch"] in ("llama", "qwen3")
    raise ConfigError(OPTION, path, f"it is a draft with {told}", f"Give its own: {flags}." if known else ANOTHER)


def _check_constants(path: str, theirs: dict[str, Any], config: DraftConfig) -> None:
    eps = config.rms_norm_eps  # a GGUF keeps it in float32
    ours: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": theirs["rms_norm_eps"] if math.isclose(eps, theirs["rms_norm_eps"], rel_tol=1e-3) else eps,
        "rope": {"partial_rotary_factor": 1.0} | {k: v for k, v in config.rope.items() if v is not None},
    }
    theirs["rope"] = {"partial_rotary_factor": 1.0} | theirs["rope"]
    for name, own in ours.items():
        if own != theirs[name]:
            raise ConfigError(
                OPTION, path, f"its {name} is {theirs[name]} and the target's {own}, which a draft has here", ANOTHER
            )


def _check_layers(path: str, theirs: tuple[int, ...], num_layers: int, layers: LayerPlan) -> None:
    if theirs == layers.aux:
        return
    try:
        plan_layers(theirs, num_layers)
        remedy = f"Give its own: --target.layers '{list(theirs)}' (with target.layer_convention at its default)."
    except ConfigError:
        remedy = ANOTHER
    problem = f"it reads the outputs of layers {list(theirs)}, and this run makes those of {list(layers.aux)}"
    raise ConfigError(OPTION, path, problem, remedy)


def _check_tensors(path: str, tensors: dict[str, Tensor], config: DraftConfig) -> None:
    """Nothing that would be left out or break the run later."""
    with torch.device("meta"):
        known = dict(Eagle3Draft(config).named_parameters())
    extra = {"embed_tokens.weight", "d2t", "lm_head.weight"} | (
        set() if config.norm_before_fc else {"input_norm.weight"}
    )
    if odd := sorted(tensors.keys() - known.keys() - extra):
        raise ConfigError(OPTION, path, f"it has {odd[0]}, for which there is no place in a draft here", ANOTHER)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ConfigError(OPTION, path, f"{name} has values that are not finite", ANOTHER)
    if (d2t := tensors.get("d2t")) is None:
        return
    ids = d2t.long() + torch.arange(len(d2t))
    ordered = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < config.vocab_size
    if not ordered or (config.full_vocab and bool(d2t.any())):
        problem = f"its d2t does not name {len(d2t):,} of the {config.vocab_size:,} tokens in ascending order"
        raise ConfigError(OPTION, path, problem, ANOTHER)


def _check_frozen(path: str, tensors: dict[str, Tensor], config: DraftConfig, target: TargetInfo) -> None:
    """What is not trained here must be the target's."""
    if (embeddings := tensors.get("embed_tokens.weight")) is not None:
        own = load_embeddings(target)
        if not _same(embeddings[: len(own)], own):
            raise ConfigError(
                OPTION,
                path,
                "its embeddings are not the target's: they were trained, which they are not here",
                "Start from a draft with the target's embeddings.",
            )
    if (head := tensors.get("lm_head.weight")) is not None and not config.train_head:
        ids = torch.arange(config.draft_vocab_size)
        if not config.full_vocab:
            ids = ids + tensors["d2t"].long()
        if not _same(head, load_lm_head(target, ids)):
            raise ConfigError(
                OPTION, path, "its lm_head is not the target's: it was trained", "Give --model.draft.train_head true."
            )


def _same(stored: Tensor, own: Tensor) -> bool:
    """Whether the draft's matrix is the target's, which an export may have rounded."""
    return torch.equal(stored, own.to(stored.dtype))


def _said(value: object) -> str:
    """As it is written on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
