"""A finished sample as the trainer holds it: facts at hand, rows in the arena until they are let go."""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.stream.arena import Arena, copy_bits
from eagle3_lightning.stream.messages import DropReason, Sample, Stream


class SampleRows(Protocol):
    """What packing needs of a sample, wherever its rows are."""

    @property
    def index(self) -> int:
        """Of the sample in its stream."""
        ...

    @property
    def token_ids(self) -> list[int]:
        """Prompt and answer."""
        ...

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Supervised token ranges [start, end)."""
        ...

    @property
    def num_rows(self) -> int:
        """Tokens with states, S."""
        ...

    @property
    def hidden_size(self) -> int:
        """H of the rows."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        ...

    def release(self) -> None:
        """Let the rows go."""
        ...


class RowCopies(SampleRows, Protocol):
    """A sample whose rows are in memory."""

    def copy_rows(self, start: int, layers: slice, out: Float[Tensor, "S L H"]) -> None:
        """Copy the states of tokens start .. start + S - 1, only `layers` of them, into `out`."""
        ...


def num_slots(num_rows: int) -> int:
    """Slots of a document of `num_rows` tokens with states: each token but the first, beside the states before it."""
    return num_rows - 1


def supervised(spans: Sequence[tuple[int, int]], num_rows: int) -> np.ndarray:
    """[S] bool: whether token i lies in a supervised span."""
    mask = np.zeros(num_rows, bool)
    for start, end in spans:
        mask[start:end] = True
    return mask


class FinishedSample:
    """A sample whose rows lie in the arena until `release`, which every rank must call for every sample it got.

    Attributes:
        stream: `train` or `val`.
        index: of the sample in its stream.
        name: what the data set calls it.
        token_ids: prompt and answer; in generate mode the last token has no row.
        prompt_tokens: how many of them are the prompt.
        spans: supervised token ranges [start, end) of `token_ids`.
        num_rows: tokens with states, S.
        finish_reason: vLLM's: `stop` or `length`.
    """

    def __init__(self, sample: Sample, arena: Arena, release: Callable[[int], None]) -> None:
        """Wrap a sample whose rows have been checked."""
        self.stream: Stream = sample.stream
        self.index = sample.index
        self.name = sample.name
        self.token_ids = sample.token_ids
        self.prompt_tokens = sample.prompt_tokens
        self.spans = sample.spans
        self.num_rows = sample.num_rows
        self.finish_reason = sample.finish_reason
        self._serial = sample.serial
        self._blocks: list[int] | None = sample.blocks
        self._arena = arena
        self._release = release
        self._private: Tensor | None = None
        self._lock = threading.Lock()

    def rows(self) -> Float[Tensor, "S L H"]:
        """A copy of the states: auxiliary layers ascending, then the last layer after the final norm."""
        with self._lock:
            if self._private is not None:
                return self._private.clone()
            return self._arena.read(self._owned_blocks(), self.num_rows)

    def copy_rows(self, start: int, layers: slice, out: Float[Tensor, "S L H"]) -> None:
        """Copy the states of tokens start .. start + S - 1, only `layers` of them, straight into `out`."""
        with self._lock:
            if self._private is not None:
                copy_bits(self._private[start : start + out.shape[0], layers], out)
            else:
                self._arena.copy_rows(self._owned_blocks(), start, layers, out)

    def release(self) -> None:
        """Give the arena blocks back; the rows cannot be read any more. A second call does nothing."""
        with self._lock:
            self._private = None
            self._give_back()

    def spill(self) -> None:
        """Move the rows into memory of this process and give the arena blocks back early."""
        with self._lock:
            if self._blocks is not None:
                self._private = self._arena.read(self._blocks, self.num_rows)
                self._give_back()

    @property
    def hidden_size(self) -> int:
        """H of the rows."""
        return self._arena.layout.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return self._arena.layout.torch_dtype

    @property
    def was_cut(self) -> bool:
        """Whether the answer was ended by the length limit."""
        return self.finish_reason == "length" and len(self.token_ids) > self.prompt_tokens

    @property
    def holds_blocks(self) -> bool:
        """Whether arena blocks are still taken by this rank."""
        return self._blocks is not None

    def _owned_blocks(self) -> list[int]:
        assert self._blocks is not None, f"sample {self.index} was released already"
        return self._blocks

    def _give_back(self) -> None:
        if self._blocks is not None:
            self._blocks = None
            self._release(self._serial)


def find_fault(sample: Sample, arena: Arena) -> tuple[DropReason, str] | None:
    """What is wrong with the rows of a delivered sample, if anything.

    All rows must be there without a gap, belong to the very tokens of the sample, and be finite.
    """
    written = arena.num_written(sample.serial, sample.blocks)
    if written < sample.num_rows:
        return "row_mismatch", f"{sample.num_rows} rows were due and {written} are there without a gap"
    index = arena.row_index(sample.blocks, sample.num_rows)
    fed = arena.ids[index].tolist()
    if fed != sample.token_ids[: sample.num_rows]:
        first = next(i for i, (a, b) in enumerate(zip(fed, sample.token_ids, strict=False)) if a != b)
        return (
            "token_mismatch",
            f"the row of token {first} was made from id {fed[first]}, not {sample.token_ids[first]}",
        )
    bad = (arena.finite[index] == 0).nonzero()
    if len(bad):
        return "non_finite", f"{len(bad)} of {sample.num_rows} rows are not finite, the first at token {int(bad[0])}"
    return None
