"""One sample in one file, as speculators 0.9 reads and writes it (`hs_*.safetensors`), without losing a bit.

    hidden_states   [S, L, H]   auxiliary layers ascending, then the last one *before* the final norm
    token_ids       [S] int64
    loss_mask       [S] bool    ours; speculators keeps it in its data set

The states that vLLM gives us are normed, those of the format are not. Norming takes only the length of a vector away,
so `normed / weight` is a vector that the final norm turns into `normed` again, up to rounding; what rounding changed is
kept as two bits a value in `last_correction` (a whole copy in `last_normed` where two bits do not do). With fp8 there
is one scale for each token, in `hidden_states_scales`, and no correction.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_lightning.errors import SampleError
from eagle3_lightning.stream.arena import copy_bits
from eagle3_lightning.stream.messages import Stream
from eagle3_lightning.stream.packer import supervised
from eagle3_lightning.stream.sample import FinishedSample

_FP8 = torch.float8_e4m3fn
_LAST_AMPLITUDE = 32.0  # fp8 has one scale for all layers of a token: bring the last to where the others are
_INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_EXACT = ("last_normed", "last_correction")  # one of them is in a file of ours that is not fp8
_CHUNK_VALUES = 32_000  # stays in the caches, and below where torch wakes its other threads for an operation
_BYTES = np.arange(256, dtype=np.uint32)
_FOUR_STEPS = (_BYTES & 3) | (_BYTES & 12) << 6 | (_BYTES & 48) << 12 | (_BYTES & 192) << 18  # a byte: four of two bits


class SampleFileError(SampleError, ValueError):
    """A file that cannot be read as a sample."""


@dataclass(frozen=True)
class FinalNorm:
    """The target's last norm, y = x / rms(x) * weight.

    Attributes:
        weight: [H] float32, as it multiplies (1 + w for the models that write it so).
        eps: under the root.
    """

    weight: Tensor
    eps: float

    def apply(self, last: Float[Tensor, "S H"], dtype: torch.dtype) -> Float[Tensor, "S H"]:
        """Norm rows that are not normed."""
        x = last.float()
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight).to(dtype)

    def undo(self, normed: Float[Tensor, "S H"]) -> Float[Tensor, "S H"]:
        """Rows of root mean square 1 that the norm turns into `normed`; a channel of weight 0 keeps its signed zero."""
        return torch.where(self.weight == 0, normed.float(), normed.float() / self.weight).to(normed.dtype)

    def redo(self, undone: Float[Tensor, "S H"]) -> Float[Tensor, "S H"]:
        """What `undo` came from, up to rounding."""
        return (undone.float() * self.weight).to(undone.dtype)


class StoredSample:
    """A sample on disk, with the face of a FinishedSample: facts at hand, rows read when they are copied."""

    def __init__(self, path: Path, stream: Stream, index: int, norm: FinalNorm, dtype: torch.dtype) -> None:
        """Read the facts.

        Args:
            path: the file.
            stream: for which it is read.
            index: of the sample in the stream.
            norm: of the target.
            dtype: of the rows that are read, whatever the file holds.

        Raises:
            SampleFileError: missing, cut short, or without one of the tensors.
        """
        self.path, self.stream, self.index = path, stream, index
        self._norm, self.dtype = norm, dtype
        self._tensors: dict[str, Tensor] | None = None
        try:
            with safe_open(path, framework="pt") as file:
                facts = file.metadata() or {}
                self.token_ids: list[int] = file.get_tensor("token_ids").tolist()
                self.num_rows, self.num_layers, self.hidden_size = file.get_slice("hidden_states").get_shape()
                mask = file.get_tensor("loss_mask").bool() if "loss_mask" in file.keys() else None  # noqa: SIM118
            self.prompt_tokens = int(facts.get("prompt_tokens", 0))
        except (OSError, SafetensorError, ValueError) as error:
            raise SampleFileError(f"{path}: {error}") from error
        if len(self.token_ids) != self.num_rows:
            raise SampleFileError(f"{path}: {len(self.token_ids)} token ids and {self.num_rows} rows")
        if mask is not None and mask.shape != (self.num_rows,):
            raise SampleFileError(f"{path}: a loss mask of {list(mask.shape)} for {self.num_rows} rows")
        self.name = facts.get("name", path.stem)
        self.finish_reason = facts.get("finish_reason", "stop")
        self.spans = runs(mask) if mask is not None else []

    def rows(self) -> Float[Tensor, "S L H"]:
        """The states: auxiliary layers ascending, then the last layer after the final norm."""
        out = torch.empty(self.num_rows, self.num_layers, self.hidden_size, dtype=self.dtype)
        self.copy_rows(0, slice(None), out)
        return out

    def copy_rows(self, start: int, layers: slice, out: Float[Tensor, "S L H"]) -> None:
        """Copy the states of tokens start .. start + S - 1, only `layers` of them, into `out`.

        Raises:
            SampleFileError: the file is gone by now.
        """
        if self._tensors is None:
            try:
                with safe_open(self.path, framework="pt") as file:
                    self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise SampleFileError(f"{self.path}: {error}") from error
        _decode(self._tensors, self._norm, start, layers, out)

    def release(self) -> None:
        """Forget the rows."""
        self._tensors = None


def write_sample(path: Path, sample: FinishedSample | StoredSample, norm: FinalNorm, fp8: bool) -> int:
    """Write a sample beside `path` and rename it, so that no reader sees half a file. Returns its bytes."""
    num_rows = sample.num_rows
    tensors = _encode(sample.rows(), norm, fp8)
    tensors["token_ids"] = torch.tensor(sample.token_ids[:num_rows])
    tensors["loss_mask"] = supervised(sample.spans, num_rows)
    facts = {"name": sample.name, "prompt_tokens": str(sample.prompt_tokens), "finish_reason": sample.finish_reason}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, partial, metadata=facts)
    size_bytes = partial.stat().st_size
    os.replace(partial, path)
    return size_bytes


def runs(mask: Tensor) -> list[tuple[int, int]]:
    """[start, end) of each run of True."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, ends = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return list(zip(starts, ends, strict=True))


def _encode(rows: Float[Tensor, "S L H"], norm: FinalNorm, fp8: bool) -> dict[str, Tensor]:
    num_rows, _, hidden_size = rows.shape
    normed = rows[:, -1]
    if fp8:
        states = torch.cat([rows[:, :-1], (norm.undo(normed) * _LAST_AMPLITUDE)[:, None]], dim=1).float()
        scales = (states.abs().amax(dim=(1, 2), keepdim=True) / torch.finfo(_FP8).max).clamp(min=1e-12)
        return {"hidden_states": (states / scales).to(_FP8), "hidden_states_scales": scales}
    states = torch.empty(rows.shape, dtype=rows.dtype)
    copy_bits(rows[:, :-1], states[:, :-1])
    packed = torch.empty(num_rows, -(-hidden_size // 4), dtype=torch.uint8)
    fits, kind = True, _INTS[rows.dtype]
    for here in _chunks(num_rows, hidden_size):
        values = normed[here].contiguous()
        undone = norm.undo(values)
        states[here, -1] = undone
        steps = values.view(kind) - norm.redo(undone).view(kind) + 1  # may wrap around, as when they are added again
        fits = fits and not bool((steps & ~3).any())
        packed[here] = _pack_two_bits(steps.to(torch.uint8))
    exact = {"last_correction": packed} if fits else {"last_normed": normed.contiguous()}
    return {"hidden_states": states, **exact}


def _decode(
    tensors: dict[str, Tensor], norm: FinalNorm, start: int, layers: slice, out: Float[Tensor, "S L H"]
) -> None:
    """Fill `out` with rows of a file's tensors, from row `start` on, and these layers of them.

    In one thread and in chunks: several samples are read at once, see `assemble`.
    """
    end = start + len(out)
    states = tensors["hidden_states"][start:end]
    scales = tensors["hidden_states_scales"][start:end] if "hidden_states_scales" in tensors else None
    chosen = range(states.shape[1])[layers]
    has_last = chosen[-1] == states.shape[1] - 1
    if scales is None:
        num_plain = len(chosen) - has_last
        plain, dest = states[:, layers][:, :num_plain], out[:, :num_plain]
        if plain.dtype == dest.dtype:
            copy_bits(plain, dest)
        else:  # states made elsewhere, in another precision than this run's
            dest.copy_(plain)
        if not has_last:
            return
    exact = {name: tensors[name][start:end] for name in _EXACT if name in tensors}
    for here in _chunks(len(out), states.shape[2] * (1 if scales is None else len(chosen))):
        if scales is not None:
            out[here] = states[here, layers].float() * scales[here].float()
        if has_last:
            last = states[here, -1] if scales is None else out[here, -1]
            out[here, -1] = _normed({name: tensor[here] for name, tensor in exact.items()}, last, norm)


def _normed(exact: dict[str, Tensor], last: Float[Tensor, "S H"], norm: FinalNorm) -> Float[Tensor, "S H"]:
    if "last_normed" in exact:
        return exact["last_normed"]
    if "last_correction" not in exact:
        return norm.apply(last, last.dtype)
    steps = _unpack_two_bits(exact["last_correction"], last.shape[-1]) - 1
    return (norm.redo(last).view(_INTS[last.dtype]) + steps).view(last.dtype)


def _chunks(num_rows: int, row_values: int) -> Iterator[slice]:
    size = max(1, _CHUNK_VALUES // row_values)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _pack_two_bits(values: Tensor) -> Tensor:
    """[S, H] of 0 .. 3 as uint8 [S, H / 4], rounded up."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 4)).view(len(values), -1, 4)
    return padded[..., 0] | padded[..., 1] << 2 | padded[..., 2] << 4 | padded[..., 3] << 6


def _unpack_two_bits(packed: Tensor, width: int) -> Tensor:
    return torch.from_numpy(_FOUR_STEPS[packed.numpy()].view(np.int8))[:, :width]


def as_rows(hidden_states: Any, norm: FinalNorm) -> Float[Tensor, "S L H"]:
    """States of speculators (last layer not normed; a tensor or a list of layers) as ours."""
    states = torch.stack(list(hidden_states), dim=1) if isinstance(hidden_states, list | tuple) else hidden_states
    out = torch.empty_like(states)
    _decode({"hidden_states": states}, norm, 0, slice(None), out)
    return out
