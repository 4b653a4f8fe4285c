"""What is read of the target's checkpoint: sizes, rotary parameters, end-of-turn ids, embeddings and lm_head.

Only JSON files and safetensors are read, never model code, so that `eagle3` can refuse a target in a second and without
vLLM. Tensors are memory-mapped: picking 32,000 rows of an lm_head does not load the rest of the checkpoint.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from eagle3_lightning.checkpoint_files import CheckpointFiles
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.fingerprint import fingerprint
from eagle3_lightning.options import TargetOptions

OPTION = "target.path"
# Nested configurations of multimodal and wrapped models (Kimi-K2.5, Gemma 3, Qwen3-VL), most specific first.
_TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config")
_EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "wte.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
)
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORM_NAMES = ("model.norm.weight", "norm.weight", "final_layernorm.weight", "ln_f.weight")
# Their RMSNorm multiplies with 1 + weight.
_NORMS_FROM_ONE = ("gemma", "gemma2", "gemma3", "gemma3_text", "recurrent_gemma", "qwen3_next", "qwen3_5",
                   "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")  # fmt: skip
# Files of a hub snapshot that this project or vLLM needs; everything else (ONNX, GGUF, original/) stays on the hub.
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja"]
_HUB_SIZES = ["config.json", "generation_config.json"]


@dataclass(frozen=True)
class TargetInfo:
    """The facts of a target that a draft must agree with.

    Attributes:
        path: the checkpoint's local directory, absolute.
        name: how an export names the target: `target.name`, or `target.path` as the user wrote it.
        model_type: of the text model.
        architectures: class names from the outer config.json.
        hidden_size: H.
        intermediate_size: width of the (dense) MLP.
        num_layers: decoder layers N.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a head (of the values where keys and values differ, as in MLA).
        vocab_size: V; ids are 0 .. V - 1.
        rms_norm_eps: of the target's norms.
        rope: rotary parameters in Transformers 5's `rope_parameters` form: `rope_type`, `rope_theta`, and what the
            type needs.
        max_position_embeddings: longest sequence.
        hidden_act: activation of the MLP.
        dtype: of the weights, for example `bfloat16`.
        tie_word_embeddings: the lm_head is the embedding.
        eos_token_ids: ids that end a turn, from config.json and generation_config.json, ascending.
        logit_scale: the target multiplies its logits by this (1.0 for almost every model).
        logit_softcap: the target's logits are cap * tanh(logits / cap); None for almost every model.
        fingerprint: of sizes and weights (see fingerprint.py for what it sees); equal for copies of one checkpoint.
    """

    path: Path
    name: str
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    max_position_embeddings: int
    hidden_act: str
    dtype: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    logit_scale: float
    logit_softcap: float | None
    fingerprint: str


def inspect_target(options: TargetOptions) -> TargetInfo:
    """Read what a draft needs to know of the target.

    Args:
        options: the checkpoint, by directory or hub id, and the name for the export.

    Raises:
        ConfigError: no such directory or hub repository, no config.json or safetensors, a size missing, or one
            whose embedding or lm_head cannot be used (quantized, biased, fewer rows than the vocabulary).
    """
    path = _local_directory(options.path, _HUB_PATTERNS)
    described = _describe(path, options)
    files = CheckpointFiles(path, options.path)
    embedding = files.find(_EMBEDDING_NAMES, "embedding")
    outer = read_config(path, options.path)
    config = text_config(outer)
    if "tie_word_embeddings" not in {**outer, **config} and not files.has(_HEAD_NAMES):
        described = replace(described, tie_word_embeddings=True)  # as Gemma, whose config.json leaves it out
    head = embedding if described.tie_word_embeddings else files.find(_HEAD_NAMES, "lm_head")
    for name in {embedding, head}:
        files.check_matrix(name, described.vocab_size, described.hidden_size)
    always = {embedding, head} | ({files.find(_NORM_NAMES, "final norm")} if files.has(_NORM_NAMES) else set())
    return replace(described, dtype=files.dtype(embedding), fingerprint=fingerprint(config, files, always))


def describe_target(options: TargetOptions) -> TargetInfo:
    """The same from config.json alone, for a target whose weights are not here; it has no fingerprint.

    Args:
        options: a directory with config.json, or a hub id.

    Raises:
        ConfigError: no such directory or hub repository, no config.json, or a size missing.
    """
    return _describe(_local_directory(options.path, _HUB_SIZES), options)


def _describe(path: Path, options: TargetOptions) -> TargetInfo:
    outer = read_config(path, options.path)
    config = text_config(outer)
    hidden_size, num_heads = (
        _size(config, "hidden_size", options.path),
        _size(config, "num_attention_heads", options.path),
    )
    granite_scale = config.get("logits_scaling")  # Granite divides where Cohere multiplies
    return TargetInfo(
        path=path,
        name=options.name or options.path,
        model_type=str(config.get("model_type", outer.get("model_type", "unknown"))),
        architectures=tuple(outer.get("architectures") or ()),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size", options.path),
        num_layers=_size(config, "num_hidden_layers", options.path),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=int(config.get("head_dim") or config.get("v_head_dim") or hidden_size // num_heads),
        vocab_size=_size(config, "vocab_size", options.path),
        rms_norm_eps=float(config.get("rms_norm_eps") or config.get("layer_norm_epsilon") or 1e-6),
        rope=rope_parameters(config),
        max_position_embeddings=_size(config, "max_position_embeddings", options.path),
        hidden_act=str(config.get("hidden_act") or config.get("hidden_activation") or "silu"),
        dtype=_stated_dtype(config, outer),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", outer.get("tie_word_embeddings", False))),
        eos_token_ids=_eos_token_ids(path, config, outer),
        logit_scale=float(config.get("logit_scale") or (1 / granite_scale if granite_scale else 1.0)),
        logit_softcap=config.get("final_logit_softcapping"),
        fingerprint="",
    )


def _stated_dtype(*configs: dict[str, Any]) -> str:
    """What config.json says of the weights that are not quantized; bfloat16 where it says nothing of use."""
    for config in configs:
        stated = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
        if stated in ("bfloat16", "float16", "float32"):
            return stated
    return "bfloat16"


def load_embeddings(info: TargetInfo) -> Float[Tensor, "V H"]:
    """The target's input embedding, one row per token id, in its own dtype and without any scale the model applies."""
    files = CheckpointFiles(info.path, str(info.path))
    return files.load(files.find(_EMBEDDING_NAMES, "embedding"))[: info.vocab_size].clone()


def load_lm_head(info: TargetInfo, rows: Int[Tensor, " n"] | None = None) -> Float[Tensor, "n H"]:
    """Rows of the target's output matrix (the embedding where they are tied), in its own dtype.

    Args:
        info: the target.
        rows: token ids to pick; None takes all of them.
    """
    if info.tie_word_embeddings:
        weight = load_embeddings(info)
    else:
        files = CheckpointFiles(info.path, str(info.path))
        weight = files.load(files.find(_HEAD_NAMES, "lm_head"))[: info.vocab_size]
    return weight.clone() if rows is None else weight[rows.to(weight.device)]


def load_final_norm(info: TargetInfo) -> Float[Tensor, " H"]:
    """What the target's last RMSNorm multiplies with, in float32.

    Raises:
        ConfigError: there is none, or it has a bias, so that it is no RMSNorm.
    """
    files = CheckpointFiles(info.path, str(info.path))
    name = files.find(_NORM_NAMES, "final norm")
    files.refuse_bias(name)
    weight = files.load(name).float()
    return weight + 1 if info.model_type in _NORMS_FROM_ONE else weight.clone()


def _local_directory(path: str, patterns: list[str]) -> Path:
    """A checkpoint directory as it stands, or the local snapshot of a hub repository's files of these patterns."""
    local = Path(path).expanduser()
    if local.is_dir():
        return local.resolve()
    if local.exists():
        raise ConfigError(
            OPTION, path, "it is a file", "Name the directory that holds config.json and the safetensors."
        )
    if path.startswith(("/", ".", "~")) or path.count("/") != 1:
        raise ConfigError(
            OPTION,
            path,
            "there is no such directory",
            "Name a checkpoint directory, or a hub id such as meta-llama/Llama-3.1-8B-Instruct.",
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, allow_patterns=patterns)).resolve()
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            OPTION,
            path,
            f"no such directory, and the hub did not give it ({reason})",
            "Check the id and your access to it, or name a local checkpoint directory.",
        ) from error


def _read_json(directory: Path, name: str, given: str) -> dict[str, Any]:
    try:
        content = json.loads((directory / name).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            OPTION,
            given,
            f"it holds no {name}, so it is not a checkpoint",
            "Name a directory in the Hugging Face format (config.json and safetensors).",
        ) from error
    except ValueError as error:
        raise ConfigError(
            OPTION, given, f"its {name} is not JSON ({error})", "Download the checkpoint again."
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(OPTION, given, f"its {name} is not a JSON object", "Download the checkpoint again.")
    return content


def read_config(directory: Path, given: str) -> dict[str, Any]:
    """A checkpoint's config.json; `given` is the checkpoint as the user named it."""
    return _read_json(directory, "config.json", given)


def text_config(outer: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json."""
    for key in _TEXT_CONFIG_KEYS:
        if isinstance(outer.get(key), dict):
            inner: dict[str, Any] = outer[key]
            return inner
    return outer


def _size(config: dict[str, Any], key: str, given: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(
            OPTION,
            given,
            f"its config.json says {key} = {value!r} and a decoder needs a positive number",
            "Choose a decoder-only language model.",
        )
    return value


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Transformers 5's `rope_parameters`, or the same from the older `rope_theta` and `rope_scaling`."""
    new = config.get("rope_parameters")
    if isinstance(new, dict) and new:
        # Models that mix attention types keep one set for each; the draft attends to everything.
        rope = dict(new.get("full_attention", next(iter(new.values()))) if _is_nested(new) else new)
    else:
        rope = dict(config.get("rope_scaling") or {})
    if "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    if (partial := config.get("partial_rotary_factor")) is not None:
        rope.setdefault("partial_rotary_factor", partial)
    return rope


def _is_nested(rope: dict[str, Any]) -> bool:
    return all(isinstance(value, dict) for value in rope.values())


def _eos_token_ids(path: Path, *configs: dict[str, Any]) -> tuple[int, ...]:
    """What both files name: chat models often add their end-of-turn id in generation_config.json only."""
    generation = path / "generation_config.json"
    named = [config.get("eos_token_id") for config in configs]
    if generation.is_file():
        named.append(_read_json(path, generation.name, str(path)).get("eos_token_id"))
    ids = {i for value in named if value is not None for i in (value if isinstance(value, list) else [value])}
    return tuple(sorted(ids))
