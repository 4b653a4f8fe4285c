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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

from eagle3_lightning.errors import SampleError
from eagle3_lightning.stream.arena import as_bits, copy_bits
from eagle3_lightning.stream.messages import Stream
from eagle3_lightning.stream.sample import FinishedSample, supervised
from eagle3_lightning.stream.tensor_file import TensorFile

_FP8 = torch.float8_e4m3fn
_LAST_AMPLITUDE = 32.0  # fp8 has one scale for all layers of a token: bring the last to where the others are
_INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_ROWS = ("hidden_states", "hidden_states_scales", "last_normed", "last_correction")  # tensors of one row a token
_CHUNK_VALUES = 32_000  # stays in the caches, and below where torch wakes its other threads for an operation
_STEPS = (np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3) - 1
_FOUR_STEPS = _STEPS.astype(np.int8).view(np.uint32)[:, 0]  # of a byte: its four times two bits, less one


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
        """What `undo` came from, up to rounding.

        In chunks that one thread works on, and with one call for all of them: each gives Python's lock away.
        """
        values, size = _converted(undone, torch.float32, copy=True), _chunk_rows(undone)
        torch._foreach_mul_(values.split(size), [self.weight] * -(-len(values) // size))
        return _converted(values, undone.dtype)


class StoredSample:
    """A sample on disk, with the face of a FinishedSample: facts at hand, rows read when they are asked for."""

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
        self.norm, self.dtype = norm, dtype
        try:
            self.file = TensorFile(path, ("token_ids", "loss_mask"))
            self.num_rows, self.num_layers, self.hidden_size = self.file["hidden_states"].shape
            token_ids = self.file.values("token_ids")
            mask = self.file.values("loss_mask").astype(bool) if "loss_mask" in self.file.entries else None
            self.prompt_tokens = int(self.file.metadata.get("prompt_tokens", 0))
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        if token_ids.shape != (self.num_rows,):
            raise SampleFileError(f"{path}: {token_ids.size} token ids and {self.num_rows} rows")
        if mask is not None and mask.shape != (self.num_rows,):
            raise SampleFileError(f"{path}: a loss mask of {list(mask.shape)} for {self.num_rows} rows")
        found = {name: entry for name, entry in self.file.entries.items() if name in _ROWS}
        self.tensors = dict(sorted(found.items(), key=lambda item: item[1].start))
        if wrong := [name for name, entry in self.tensors.items() if entry.shape[:1] != (self.num_rows,)]:
            raise SampleFileError(f"{path}: its {wrong[0]} are not of {self.num_rows} rows")
        self.token_ids: list[int] = token_ids.tolist()
        self.name = self.file.metadata.get("name", path.stem)
        self.finish_reason = self.file.metadata.get("finish_reason", "stop")
        self.spans = runs(mask) if mask is not None else []

    @property
    def form(self) -> tuple[Any, ...]:
        """Alike for samples whose rows can be read as if they were those of one; see `read_slots`."""
        return tuple((name, entry.dtype, entry.shape[1:]) for name, entry in self.tensors.items())

    def rows(self) -> Float[Tensor, "S L H"]:
        """The states: auxiliary layers ascending, then the last layer after the final norm.

        Raises:
            SampleFileError: the file is gone by now, or another.
        """
        return _read_rows([self])

    def release(self) -> None:
        """Nothing is held."""


def read_slots(
    samples: Sequence[StoredSample], features: Float[Tensor, "T A H"], teacher: Float[Tensor, "T H"]
) -> None:
    """Fill the slots of samples of one form, end to end: of each, all rows but the last, and all but the first.

    All at once, since every call gives Python's lock away, and the training step beside it waits to have it back.

    Raises:
        SampleFileError: a file is gone by now, or another.
    """
    rows = _read_rows(samples)
    num_layers, hidden_size = rows.shape[1:]
    ends = np.cumsum([sample.num_rows for sample in samples])
    is_first, is_last = np.zeros(len(rows), bool), np.zeros(len(rows), bool)
    is_first[0], is_first[ends[:-1]], is_last[ends - 1] = True, True, True
    vectors = as_bits(rows).reshape(-1, hidden_size)  # a row of one layer each
    aux = np.flatnonzero(~is_last)[:, None] * num_layers + np.arange(features.shape[1])
    last = np.flatnonzero(~is_first) * num_layers + num_layers - 1
    for index, out in ((aux.ravel(), features), (last, teacher)):
        np.take(vectors, index, axis=0, out=as_bits(out).reshape(-1, hidden_size), mode="clip")  # `raise` copies twice


def _read_rows(samples: Sequence[StoredSample]) -> Float[Tensor, "R L H"]:
    """The rows of samples of one form, end to end."""
    num_rows, entries = sum(sample.num_rows for sample in samples), samples[0].tensors
    row_bytes = {name: entry.dtype.itemsize * prod(entry.shape[1:]) for name, entry in entries.items()}
    buffers = {name: np.empty(num_rows * size, np.uint8) for name, size in row_bytes.items()}
    start = 0
    for sample in samples:
        end = start + sample.num_rows
        parts = [(name, buffers[name][start * size : end * size].data) for name, size in row_bytes.items()]
        try:
            sample.file.read_into(parts)
        except (OSError, ValueError) as error:
            raise _unreadable(sample.path, error) from error
        start = end
    tensors = {
        name: torch.from_numpy(buffer).view(entries[name].dtype).view(num_rows, *entries[name].shape[1:])
        for name, buffer in buffers.items()
    }
    return _decode(tensors, samples[0].norm, samples[0].dtype)


def _unreadable(path: Path, error: Exception) -> SampleFileError:
    return SampleFileError(f"{path}: {error.strerror if isinstance(error, OSError) else error}")


def write_sample(path: Path, sample: FinishedSample | StoredSample, norm: FinalNorm, fp8: bool) -> int:
    """Write a sample beside `path` and rename it, so that no reader sees half a file. Returns its bytes."""
    num_rows = sample.num_rows
    tensors = _encode(sample.rows(), norm, fp8)
    tensors["token_ids"] = torch.tensor(sample.token_ids[:num_rows])
    tensors["loss_mask"] = torch.from_numpy(supervised(sample.spans, num_rows))
    facts = {"name": sample.name, "prompt_tokens": str(sample.prompt_tokens), "finish_reason": sample.finish_reason}
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(tensors, partial, metadata=facts)
    size_bytes = partial.stat().st_size
    os.replace(partial, path)
    return size_bytes


def runs(mask: np.ndarray | Sequence[bool]) -> list[tuple[int, int]]:
    """[start, end) of each run of True."""
    padded = np.zeros(len(mask) + 2, bool)
    padded[1:-1] = mask
    edges = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


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
    for here in _chunks(num_rows, _chunk_rows(normed)):
        values = normed[here].contiguous()
        undone = norm.undo(values)
        states[here, -1] = undone
        steps = values.view(kind) - norm.redo(undone).view(kind) + 1  # may wrap around, as when they are added again
        fits = fits and not bool((steps & ~3).any())
        packed[here] = _pack_two_bits(steps.to(torch.uint8))
    exact = {"last_correction": packed} if fits else {"last_normed": normed.contiguous()}
    return {"hidden_states": states, **exact}


def _decode(tensors: dict[str, Tensor], norm: FinalNorm, dtype: torch.dtype) -> Float[Tensor, "S L H"]:
    """Rows from the tensors of a file, whose memory they may take over.

    In one thread, see `_chunk_rows`, and with few calls, each of which gives Python's lock away.
    """
    states = tensors["hidden_states"]
    if "hidden_states_scales" in tensors:
        values = _converted(states, torch.float32)
        size = _chunk_rows(values)
        torch._foreach_mul_(values.split(size), tensors["hidden_states_scales"].float().split(size))
        states = _converted(values, dtype)
    last = states[:, -1]
    if "last_normed" in tensors:
        copy_bits(tensors["last_normed"], last)
    elif "last_correction" in tensors:
        steps = np.take(_FOUR_STEPS, tensors["last_correction"].numpy()).view(np.int8)[:, : last.shape[1]]
        np.add(as_bits(norm.redo(last)), steps, out=as_bits(last))
    else:
        for rows in last.split(_chunk_rows(last)):
            rows.copy_(norm.apply(rows, rows.dtype))
    return _converted(states, dtype)  # states made elsewhere may be in another precision than this run's


def _converted(rows: Tensor, dtype: torch.dtype, copy: bool = False) -> Tensor:
    """Rows in another dtype, as `Tensor.to` gives them."""
    if rows.dtype == dtype and not copy:
        return rows
    out = torch.from_numpy(np.empty((*rows.shape, dtype.itemsize), np.uint8)).view(dtype).squeeze(-1)  # in huge pages
    size = _chunk_rows(rows)
    torch._foreach_copy_(out.split(size), rows.split(size))
    return out


def _chunk_rows(rows: Tensor) -> int:
    """Rows that a thread works on alone: several samples are read at once, and torch's threads are not for that."""
    return max(1, _CHUNK_VALUES // max(1, prod(rows.shape[1:])))


def _chunks(num_rows: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def _pack_two_bits(values: Tensor) -> Tensor:
    """[S, H] of 0 .. 3 as uint8 [S, H / 4], rounded up."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 4)).view(len(values), -1, 4)
    return padded[..., 0] | padded[..., 1] << 2 | padded[..., 2] << 4 | padded[..., 3] << 6


def as_rows(hidden_states: Any, norm: FinalNorm) -> Float[Tensor, "S L H"]:
    """States of speculators (last layer not normed; a tensor or a list of layers) as ours."""
    stacked = isinstance(hidden_states, list | tuple)
    states = torch.stack(list(hidden_states), dim=1) if stacked else hidden_states.clone()
    return _decode({"hidden_states": states}, norm, states.dtype)
