"""Rotary position tables, as vLLM computes them for the served draft."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.errors import ConfigError


class Rope:
    """Cosine and sine tables by position, grown on demand; half-split rotation, optionally of a part of the head only.

    A rotated channel d is `x[d] * cos[d] + x[partner(d)] * sin[d]`, where the partner of the first half of the rotated
    channels lies in the second half and the other way round, and `sin` carries the sign. Channels that are not rotated
    have cos 1 and sin 0.
    """

    def __init__(self, rope: dict[str, Any], head_dim: int, max_position_embeddings: int) -> None:
        """Read the rotary parameters.

        Args:
            rope: in the `rope_parameters` form.
            head_dim: size of a head.
            max_position_embeddings: the target's own; some types scale from it when they do not say from what.

        Raises:
            ConfigError: a rotary type that is not known here.
        """
        self.head_dim = head_dim
        self.rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        self.inv_freq, self.amplitude = _frequencies(rope, self.rotary_dim, max_position_embeddings)
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, num_positions: int, like: Tensor) -> tuple[Float[Tensor, "P D"], Float[Tensor, "P D"]]:
        """Cosines and signed sines for positions 0 .. P - 1 with P at least `num_positions`.

        Args:
            num_positions: positions needed.
            like: a tensor of the device; the tables are float32, or float64 if it is.
        """
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        cos = None if self._tables is None else self._tables[0]
        if cos is None or cos.shape[0] < num_positions or cos.device != like.device or cos.dtype != dtype:
            size = max(2048, 1 << (num_positions - 1).bit_length())  # powers of two: grown seldom
            self._tables = self._build(size, like.device, dtype)
        assert self._tables is not None
        return self._tables

    def _build(self, size: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(size, dtype=torch.float64, device="cpu"), self.inv_freq)
        cos = torch.ones(size, self.head_dim, dtype=torch.float64, device="cpu")
        sin = torch.zeros_like(cos)
        cos[:, : self.rotary_dim] = (angles.cos() * self.amplitude).repeat(1, 2)
        sin[:, : self.rotary_dim] = torch.cat([-angles.sin(), angles.sin()], dim=1) * self.amplitude
        return cos.to(device, dtype), sin.to(device, dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> Tensor:
    """Turn heads `x` [N, heads, D] by the rows of `cos` and `sin` [N, D]; give `-sin` to turn them back."""
    half = rotary_dim // 2
    partner = torch.cat([x[..., half:rotary_dim], x[..., :half], x[..., rotary_dim:]], dim=-1)
    return x * cos[:, None] + partner * sin[:, None]


def _frequencies(rope: dict[str, Any], dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Inverse frequencies [dim / 2] in float64 and the factor on cos and sin."""
    kind = rope.get("rope_type", "default")
    base = float(rope.get("rope_theta", 10000.0))
    inv_freq = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if kind in ("default", "mrope"):  # on text alone the three axes of mrope carry the same position
        return inv_freq, 1.0
    if kind == "linear":
        return inv_freq / rope["factor"], 1.0
    if kind == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if kind == "yarn":
        return _yarn(inv_freq, rope, base, dim, max_positions)
    raise ConfigError(
        "target.path",
        kind,
        "this rotary type (rope_type) is not implemented for drafts",
        "Known are default, linear, llama3, yarn and mrope.",
    )


def _llama3(inv_freq: Tensor, rope: dict[str, Any]) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear passage between (Llama 3.1)."""
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * inv_freq / (2 * math.pi)  # full turns over the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns >= low).double()
    return inv_freq * keep + inv_freq / rope["factor"] * (1 - keep)


def _yarn(inv_freq: Tensor, rope: dict[str, Any], base: float, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): interpolate slow channels, keep fast ones, and scale cos and sin."""
    factor = rope["factor"]
    original = rope.get("original_max_position_embeddings") or max_positions

    def channel(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(rope.get("beta_fast") or 32), channel(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    interpolate = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / max(high - low, 1e-3)).clamp(
        0, 1
    )
    scaled = inv_freq * (1 - interpolate) + inv_freq / factor * interpolate
    return scaled, _yarn_amplitude(rope, factor)


def _yarn_amplitude(rope: dict[str, Any], factor: float) -> float:
    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return magnitude(1.0)
