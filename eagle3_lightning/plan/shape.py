"""The tensors of a target, counted from its config.json: how many values, in how many bits, and who holds them.

Counted are decoder-only language models with grouped-query or latent attention (MLA), dense or with experts. What the
count does not know (vision towers, linear attention) is named in `TargetShape.notes`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import TargetOptions
from eagle3_lightning.target import TargetInfo, describe_target, read_config, text_config

_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0}
_QKV_BIAS = ("qwen2", "qwen2_moe")  # whose attention has a bias although config.json does not say so
_HEAD_NORMS = ("qwen3", "qwen3_moe")
_FULL_ATTENTION = ("full_attention", "sliding_attention", "attention")


@dataclass(frozen=True)
class Part:
    """Tensors of one kind.

    Attributes:
        name: a module name, with its first layer's (and expert's) number.
        params: values of all of them.
        bits: of one value, scales included.
        sharded: tensor parallelism splits them; otherwise every GPU has all of them.
        role: `embedding`, `head`, `layer` or `expert` (of which a token uses some).
    """

    name: str
    params: int
    bits: float
    sharded: bool
    role: str

    @property
    def num_bytes(self) -> float:
        """Of all of them."""
        return self.params * self.bits / 8


@dataclass(frozen=True)
class Experts:
    """Routed experts of a layer: how many there are, and how many a token uses."""

    total: int
    used: int

    def touched(self, num_tokens: float) -> float:
        """Expected share of a layer's experts that a batch of tokens needs, if the router spreads them evenly."""
        return float(1 - (1 - self.used / self.total) ** num_tokens)


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention (MLA): one compressed key and value for all heads."""

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True)
class TargetShape:
    """A target as the plan sees it.

    Attributes:
        info: its sizes.
        parts: its tensors.
        experts: None for a dense model.
        latent: None where attention has keys and values for each head.
        quantization: how config.json names it, or None.
        notes: what was not counted.
    """

    info: TargetInfo
    parts: tuple[Part, ...]
    experts: Experts | None
    latent: Latent | None
    quantization: str | None
    notes: tuple[str, ...]

    @property
    def params(self) -> int:
        """All values."""
        return sum(part.params for part in self.parts)

    @property
    def num_bytes(self) -> float:
        """All weights."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def active_params(self) -> float:
        """Values that a token is multiplied with in the decoder layers."""
        share = self.experts.used / self.experts.total if self.experts else 1.0
        scale = {"layer": 1.0, "expert": share}
        return sum(part.params * scale.get(part.role, 0.0) for part in self.parts)

    def gpu_bytes(self, tensor_parallel: int) -> float:
        """Weights on each of the GPUs that share them."""
        return sum(part.num_bytes / (tensor_parallel if part.sharded else 1) for part in self.parts)

    def read_bytes(self, tensor_parallel: int, num_tokens: float) -> float:
        """Weights that one GPU reads to run a batch of so many tokens through all layers and the head."""
        share = self.experts.touched(num_tokens) if self.experts else 1.0
        scale = {"layer": 1.0, "head": 1.0, "expert": share}
        shards = [tensor_parallel if part.sharded else 1 for part in self.parts]
        head = 0.0
        if self.info.tie_word_embeddings:
            head = sum(p.num_bytes for p in self.parts if p.role == "embedding") / tensor_parallel
        return head + sum(p.num_bytes * scale.get(p.role, 0.0) / n for p, n in zip(self.parts, shards, strict=True))

    def kv_bytes(self, tensor_parallel: int, value_bytes: float) -> float:
        """KV cache of one token on each GPU. A latent cache is whole on every GPU, and so is a head that all share."""
        info = self.info
        if self.latent:
            return info.num_layers * (self.latent.rank + self.latent.rope_dim) * value_bytes
        heads = max(1.0, info.num_kv_heads / tensor_parallel)
        return info.num_layers * 2 * heads * info.head_dim * value_bytes

    def attention_flops(self, context_tokens: float, *, decoding: bool) -> float:
        """Forward FLOPs of one token's attention to `context_tokens` keys, all layers."""
        info = self.info
        if self.latent is None:
            channels = 2 * info.head_dim
        elif decoding:  # against the latent itself
            channels = 2 * self.latent.rank + self.latent.rope_dim
        else:
            channels = self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
        return 2.0 * info.num_layers * info.num_heads * channels * context_tokens

    def token_flops(self, context_tokens: float, *, decoding: bool) -> float:
        """Forward FLOPs of one token; the head's are in it while decoding (a prompt needs one row of it)."""
        head = 2.0 * self.info.vocab_size * self.info.hidden_size if decoding else 0.0
        return 2.0 * self.active_params + self.attention_flops(context_tokens, decoding=decoding) + head


def read_shape(options: TargetOptions, dtype: str = "auto") -> TargetShape:
    """Count a target.

    Args:
        options: a directory with config.json (weights are not needed), or a hub id.
        dtype: `data.engine.dtype`; `auto` is the checkpoint's own.

    Raises:
        ConfigError: no such target, or its config.json lacks a size.
    """
    info = describe_target(options)
    outer = read_config(info.path, options.path)
    try:
        return count(info, outer, info.dtype if dtype == "auto" else dtype)
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ConfigError(
            "target.path",
            options.path,
            f"its config.json does not say how large it is ({type(error).__name__}: {error})",
            "Check it against the one of the model's repository.",
        ) from error


def count(info: TargetInfo, outer: dict[str, Any], dtype: str) -> TargetShape:
    """Count the tensors that a config.json describes.

    Args:
        info: its sizes.
        outer: the whole config.json.
        dtype: of what is not quantized.
    """
    config = text_config(outer)
    bits = Quantization(outer.get("quantization_config") or config.get("quantization_config") or {}, _BITS[dtype])
    hidden, layers, matrices = info.hidden_size, info.num_layers, _Matrices(bits)
    latent = _latent(config)
    matrices.add("model.embed_tokens", info.vocab_size * hidden, 1, role="embedding")
    if not info.tie_word_embeddings:
        matrices.add("lm_head", info.vocab_size * hidden, 1, role="head")
    if latent:
        _add_latent_attention(matrices, info, latent, config)
    else:
        _add_attention(matrices, info, config)
    experts = _add_mlp(matrices, info, config)
    matrices.add("model.norms", hidden, 2 * layers + 1, sharded=False)
    return TargetShape(info, tuple(matrices.parts), experts, latent, bits.name, tuple(_notes(outer, config, bits)))


class Quantization:
    """Bits of a matrix by its module's name, from a checkpoint's `quantization_config`."""

    def __init__(self, config: dict[str, Any], plain_bits: float) -> None:
        """Read the method; what it leaves out has `plain_bits`."""
        self._plain, self._bits = plain_bits, plain_bits
        method = config.get("quant_method")
        self.name: str | None = None
        self.unknown = False
        ignored = config.get("ignore") or config.get("modules_to_not_convert") or config.get("ignored_layers") or []
        self._ignored = [str(entry) for entry in ignored] + ["lm_head"]
        self._only_experts = method == "mxfp4"
        if not config:
            return
        groups = config.get("config_groups") or {}
        weights: dict[str, Any] = dict(*list(groups.values())[:1]).get("weights") or {}
        width = weights.get("num_bits") or config.get("bits") or config.get("w_bit")
        if method == "mxfp4":
            width, group, scale_bits = 4, 32, 8
        elif method in ("fp8", "fbgemm_fp8"):
            block = config.get("weight_block_size") or [1, 0]
            width, group, scale_bits = 8, block[0] * block[1], 32
        else:
            group = weights.get("group_size") or config.get("group_size") or config.get("q_group_size") or 0
            scale_bits = 16
        if width is None:
            self.name, self.unknown = str(method), True
            return
        self._bits = float(width) + (scale_bits / group if group and group > 0 else 0.0)
        self.name = f"{method}, {width} bits" + (f" in groups of {group}" if group and group > 0 else "")

    def of(self, module: str, role: str) -> float:
        """Bits of one value of a module's matrix."""
        if role == "embedding" or any(_matches(pattern, module) for pattern in self._ignored):
            return self._plain
        return self._plain if self._only_experts and role != "expert" else self._bits


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.endswith("." + pattern) or f".{pattern}." in f".{module}."


class _Matrices:
    """Collects parts."""

    def __init__(self, bits: Quantization) -> None:
        self._bits, self.parts = bits, list[Part]()

    def add(self, name: str, params: int, copies: int, *, sharded: bool = True, role: str = "layer") -> None:
        """Count `copies` tensors of `params` values; norms and biases are never quantized."""
        if copies and params:
            small = name.endswith(("norm", "norms", "bias", ".mlp.gate"))
            bits = self._bits._plain if small else self._bits.of(name, role)
            self.parts.append(Part(name, params * copies, bits, sharded, role))


def _latent(config: dict[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    return Latent(config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"])


def _add_attention(matrices: _Matrices, info: TargetInfo, config: dict[str, Any]) -> None:
    layers, q, kv = info.num_layers, info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    prefix = "model.layers.0.self_attn."
    for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        matrices.add(prefix + name, info.hidden_size * width, layers)
    matrices.add(prefix + "o_proj", q * info.hidden_size, layers)
    bias = config.get("attention_bias")
    if bias or info.model_type in _QKV_BIAS:
        matrices.add(prefix + "qkv.bias", q + 2 * kv + (info.hidden_size if bias else 0), layers)
    if info.model_type in _HEAD_NORMS:
        matrices.add(prefix + "head_norms", 2 * info.head_dim, layers, sharded=False)


def _add_latent_attention(matrices: _Matrices, info: TargetInfo, latent: Latent, config: dict[str, Any]) -> None:
    layers, hidden, heads = info.num_layers, info.hidden_size, info.num_heads
    prefix, query_dim = "model.layers.0.self_attn.", latent.nope_dim + latent.rope_dim
    rank = config.get("q_lora_rank")
    if rank:
        matrices.add(prefix + "q_a_proj", hidden * rank, layers, sharded=False)
        matrices.add(prefix + "q_a_layernorm", rank, layers, sharded=False)
    matrices.add(prefix + ("q_b_proj" if rank else "q_proj"), (rank or hidden) * heads * query_dim, layers)
    matrices.add(prefix + "kv_a_proj_with_mqa", hidden * (latent.rank + latent.rope_dim), layers, sharded=False)
    matrices.add(prefix + "kv_a_layernorm", latent.rank, layers, sharded=False)
    matrices.add(prefix + "kv_b_proj", latent.rank * heads * (latent.nope_dim + latent.value_dim), layers)
    matrices.add(prefix + "o_proj", heads * latent.value_dim * hidden, layers)


def _add_mlp(matrices: _Matrices, info: TargetInfo, config: dict[str, Any]) -> Experts | None:
    """Dense layers and layers with experts."""
    hidden, dense = info.hidden_size, 3 * info.hidden_size * info.intermediate_size
    total = next((config[k] for k in ("n_routed_experts", "num_experts", "num_local_experts") if config.get(k)), None)
    if total is None:
        matrices.add("model.layers.0.mlp.up_proj", dense, info.num_layers)
        return None
    used = config.get("num_experts_per_tok") or config.get("experts_per_token") or 1
    width = config.get("moe_intermediate_size") or info.intermediate_size
    sparse = _sparse_layers(info.num_layers, config)
    first, prefix = (sparse or [0])[0], f"model.layers.{(sparse or [0])[0]}.mlp."
    matrices.add("model.layers.0.mlp.up_proj", dense, info.num_layers - len(sparse))
    matrices.add(prefix + "experts.0.up_proj", 3 * hidden * width, total * len(sparse), role="expert")
    shared = (config.get("n_shared_experts") or 0) * width or config.get("shared_expert_intermediate_size") or 0
    matrices.add(prefix + "shared_experts.up_proj", 3 * hidden * shared, len(sparse))
    matrices.add(f"model.layers.{first}.mlp.gate", hidden * total, len(sparse), sharded=False)
    if config.get("topk_method") == "noaux_tc" or config.get("model_type") == "deepseek_v3":
        matrices.add(prefix + "gate.bias", total, len(sparse), sharded=False)  # DeepSeek's correction of the scores
    return Experts(total, used)


def _sparse_layers(num_layers: int, config: dict[str, Any]) -> list[int]:
    first, step = config.get("first_k_dense_replace") or 0, config.get("decoder_sparse_step") or 1
    dense: Sequence[int] = config.get("mlp_only_layers") or ()
    return [i for i in range(first, num_layers) if i not in dense and (i + 1) % step == 0]


def _notes(outer: dict[str, Any], config: dict[str, Any], bits: Quantization) -> list[str]:
    notes = []
    if "vision_config" in outer:
        notes.append("the vision tower is not counted; it is loaded with the model")
    if bits.unknown:
        notes.append(f"quantization {bits.name!r} is not known here: its weights are counted as if they were not")
    kinds = set(config.get("layer_types") or ()) - set(_FULL_ATTENTION)
    if kinds:
        notes.append(f"layers of type {', '.join(sorted(kinds))} are counted as attention")
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        notes.append("sliding windows are not counted: the KV cache may hold more")
    return notes
