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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3_lightning.errors import SampleError
from eagle3_lightning.stream.messages import Stream
from eagle3_lightning.stream.packer import supervised
from eagle3_lightning.stream.sample import FinishedSample

_FP8 = torch.float8_e4m3fn
_LAST_AMPLITUDE = 32.0  # fp8 has one scale for all layers of a token: bring the last to where the others are
_INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


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
            dtype: of the rows, where the file holds fp8.

        Raises:
            SampleFileError: missing, cut short, or without one of the tensors.
        """
        self.path, self.stream, self.index = path, stream, index
        self._norm, self.dtype = norm, dtype
        self._rows: Tensor | None = None
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
        if self._rows is None:
            try:
                with safe_open(self.path, framework="pt") as file:
                    self._rows = _decode({name: file.get_tensor(name) for name in file.keys()}, self._norm, self.dtype)  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise SampleFileError(f"{self.path}: {error}") from error
        return self._rows

    def copy_rows(self, start: int, layers: slice, out: Float[Tensor, "S L H"]) -> None:
        """Copy the states of tokens start .. start + S - 1, only `layers` of them, into `out`."""
        out.copy_(self.rows()[start : start + out.shape[0], layers])

    def release(self) -> None:
        """Forget the rows."""
        self._rows = None


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
    normed = rows[:, -1]
    undone = norm.undo(normed)
    if fp8:
        states = torch.cat([rows[:, :-1], (undone * _LAST_AMPLITUDE)[:, None]], dim=1).float()
        scales = (states.abs().amax(dim=(1, 2), keepdim=True) / torch.finfo(_FP8).max).clamp(min=1e-12)
        return {"hidden_states": (states / scales).to(_FP8), "hidden_states_scales": scales}
    tensors = {"hidden_states": torch.cat([rows[:, :-1], undone[:, None]], dim=1)}
    kind = _INTS[rows.dtype]
    steps = normed.contiguous().view(kind).long() - norm.redo(undone).view(kind).long() + 1
    if steps.numel() and (steps.min() < 0 or steps.max() > 3):
        return {**tensors, "last_normed": normed.contiguous()}
    return {**tensors, "last_correction": _pack_two_bits(steps)}


def _decode(tensors: dict[str, Tensor], norm: FinalNorm, dtype: torch.dtype) -> Float[Tensor, "S L H"]:
    states = tensors["hidden_states"]
    if "hidden_states_scales" in tensors:
        states = (states.float() * tensors["hidden_states_scales"].float()).to(dtype)
    last = states[:, -1]
    if "last_normed" in tensors:
        normed = tensors["last_normed"]
    elif "last_correction" in tensors:
        kind = _INTS[states.dtype]
        steps = _unpack_two_bits(tensors["last_correction"], last.shape[-1]) - 1
        normed = (norm.redo(last).view(kind).long() + steps).to(kind).view(states.dtype)
    else:
        normed = norm.apply(last, states.dtype)
    return torch.cat([states[:, :-1], normed[:, None]], dim=1)


def _pack_two_bits(values: Tensor) -> Tensor:
    """[S, H] of 0 .. 3 as uint8 [S, H / 4], rounded up."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % 4)).view(len(values), -1, 4)
    return (padded << torch.tensor([0, 2, 4, 6])).sum(-1).to(torch.uint8)


def _unpack_two_bits(packed: Tensor, width: int) -> Tensor:
    return ((packed.long()[..., None] >> torch.tensor([0, 2, 4, 6])) & 3).view(len(packed), -1)[:, :width]


def as_rows(hidden_states: Any, norm: FinalNorm) -> Float[Tensor, "S L H"]:
    """States of speculators (last layer not normed; a tensor or a list of layers) as ours."""
    states = torch.stack(list(hidden_states), dim=1) if isinstance(hidden_states, list | tuple) else hidden_states
    return _decode({"hidden_states": states}, norm, states.dtype)
