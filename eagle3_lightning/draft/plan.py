"""What a packed batch makes of the unroll: which slots are computed, where each step finds its token and its teacher.

The plan is worked out on the host, before the batch moves to the device, so that the training step knows every size it
needs without asking the GPU. Two facts about test-time training make it small:

- From step 1 on, a slot sees the step-0 keys of its document and, of later steps, its own keys only. So a slot whose
  prediction is never scored needs nothing but its step-0 key and value.
- Step k of slot t uses token, mask and teacher of slot t + k of the same document. So everything that depends on the
  token alone is computed once and read at shifted rows.

The slots that are computed, `rows`, are a suffix of each document, from its first slot with a scored step to its end:
the prompt before it only gives keys and values. A document without supervision gives no rows.
"""

import itertools
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.errors import ConfigError


@dataclass(frozen=True)
class Document:
    """One document with rows: its slots [slot_start, slot_end) and its rows [row_start, row_end), a suffix of them."""

    slot_start: int
    slot_end: int
    row_start: int
    row_end: int


@dataclass(frozen=True)
class Spans:
    """Which rows attend to which slots: document by document, a suffix of its slots to all of them.

    Attributes:
        documents: those with rows.
        starts_q: cumulative rows of all documents, [documents + 1], int32.
        starts_k: cumulative slots of all documents, [documents + 1], int32.
        longest_q: rows of the document that has most.
        longest_k: slots of the document that has most.
    """

    documents: tuple[Document, ...]
    starts_q: Int[Tensor, " documents+1"]
    starts_k: Int[Tensor, " documents+1"]
    longest_q: int
    longest_k: int


@dataclass(frozen=True)
class UnrollPlan:
    """Sizes on the host, indices as tensors. `T` slots, `N` rows, `K` steps, `R` scored (step, row) pairs.

    Attributes:
        num_slots: T, padding excluded.
        num_supervised: slots scored at step 0; the loss is normalized by their global count.
        pairs_per_step: how many rows are scored at each step.
        slot_bounds: first slot of each document, and T.
        row_bounds: first row of each document, and N.
        rows: slot of each row, ascending.
        positions: position of each row in its document.
        shifted: slot whose token row n uses at step k; beyond the document's end, its last slot (never scored).
        unshifted: row that used slot s's token at step k, or N where none did (the inverse of `shifted`).
        starts_q: `row_bounds` as an int32 tensor.
        starts_k: `slot_bounds` likewise.
        supervised: slots scored at step 0; only these need a teacher.
        pairs: k * N + n of every scored pair, ascending.
        teacher_of_row: for every k * N + n, index into `supervised` of the slot that teaches it; 0 where none does.
    """

    num_slots: int
    num_supervised: int
    pairs_per_step: tuple[int, ...]
    slot_bounds: tuple[int, ...]
    row_bounds: tuple[int, ...]
    rows: Int[Tensor, " N"]
    positions: Int[Tensor, " N"]
    shifted: Int[Tensor, "K N"]
    unshifted: Int[Tensor, "K T"]
    starts_q: Int[Tensor, " documents+1"]
    starts_k: Int[Tensor, " documents+1"]
    supervised: Int[Tensor, " supervised"]
    pairs: Int[Tensor, " R"]
    teacher_of_row: Int[Tensor, " K*N"]

    @property
    def num_rows(self) -> int:
        """N, slots that are computed at every step."""
        return self.rows.shape[0]

    @property
    def num_steps(self) -> int:
        """K, steps of the unroll."""
        return self.shifted.shape[0]

    @property
    def num_pairs(self) -> int:
        """R, rows of the head."""
        return self.pairs.shape[0]

    @property
    def teacher_of_pair(self) -> Int[Tensor, " R"]:
        """Index into `supervised` of the slot that teaches each pair."""
        return self.teacher_of_row[self.pairs]

    @property
    def all_rows(self) -> bool:
        """Whether every slot is a row, so that nothing needs gathering."""
        return self.num_rows == self.num_slots

    @property
    def longest(self) -> int:
        """Slots of the longest document."""
        return max(_lengths(self.slot_bounds), default=0)

    def row_spans(self) -> Spans:
        """The rows as queries."""
        bounds = zip(itertools.pairwise(self.slot_bounds), itertools.pairwise(self.row_bounds), strict=True)
        documents = tuple(Document(*slots, *rows) for slots, rows in bounds if rows[1] > rows[0])
        return Spans(documents, self.starts_q, self.starts_k, max(_lengths(self.row_bounds), default=0), self.longest)

    def slot_spans(self) -> Spans:
        """Every slot as a query."""
        documents = tuple(Document(a, b, a, b) for a, b in itertools.pairwise(self.slot_bounds))
        return Spans(documents, self.starts_k, self.starts_k, self.longest, self.longest)

    def to(self, device: torch.device, non_blocking: bool = False) -> "UnrollPlan":
        """A copy with every tensor on `device`; from a host to a GPU through page-locked memory if not blocking."""

        def move(t: Tensor) -> Tensor:
            if non_blocking and device.type == "cuda" and t.device.type == "cpu":
                t = t.pin_memory()
            return t.to(device, non_blocking=non_blocking)

        tensors = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        moved: dict[str, Any] = {name: move(t) for name, t in tensors.items()}
        return replace(self, **moved)


def plan_unroll(batch: Eagle3Batch, num_steps: int) -> UnrollPlan:
    """Work out the plan of a batch that lies on the host.

    Args:
        batch: packed documents, padding at the end.
        num_steps: K, test-time-training steps.

    Raises:
        ConfigError: documents that are not contiguous, or positions that do not count from 0 in each.
    """
    bounds = document_bounds(batch)
    num_slots = bounds[-1]
    lengths = bounds.diff()
    start = torch.repeat_interleave(bounds[:-1], lengths)  # first slot of each slot's document
    last = torch.repeat_interleave(bounds[1:] - 1, lengths)
    slots = torch.arange(int(num_slots))
    mask = batch.mask[: int(num_slots)]
    scored = torch.stack([_shift_mask(mask, slots, last, k) for k in range(num_steps)])  # [K, T]
    rows, row_starts = _document_suffixes(scored.any(dim=0), bounds)
    shifted = torch.minimum(rows + torch.arange(num_steps)[:, None], last[rows])
    row_of_slot = torch.full((len(slots),), len(rows))
    row_of_slot[rows] = torch.arange(len(rows))
    back = slots - torch.arange(num_steps)[:, None]
    unshifted = torch.where(back >= start, row_of_slot[back.clamp(min=0)], len(rows))
    pairs = scored[:, rows].flatten().nonzero().flatten()
    teacher_of_slot = mask.cumsum(0) - 1
    return UnrollPlan(
        num_slots=len(slots),
        num_supervised=int(mask.sum()),
        pairs_per_step=tuple(scored.sum(dim=1).tolist()),
        slot_bounds=tuple(bounds.tolist()),
        row_bounds=tuple(row_starts.tolist()),
        rows=rows,
        positions=(slots - start)[rows],
        shifted=shifted,
        unshifted=unshifted,
        starts_q=row_starts.int(),
        starts_k=bounds.int(),
        supervised=mask.nonzero().flatten(),
        pairs=pairs,
        teacher_of_row=teacher_of_slot[shifted.flatten()].clamp(min=0),
    )


def document_bounds(batch: Eagle3Batch) -> Int[Tensor, " documents+1"]:
    """Slots at which documents begin, and one behind the last; checks that the packing is what `Eagle3Batch` says.

    Raises:
        ConfigError: documents that are not contiguous and ascending, padding that is not at the end, or wrong
            positions.
    """
    doc, pos = batch.doc.long(), batch.pos.long()
    num_slots = int((doc >= 0).sum())
    doc, pos, padding = doc[:num_slots], pos[:num_slots], doc[num_slots:]
    first = torch.ones(num_slots, dtype=torch.bool)
    first[1:] = doc[1:] != doc[:-1]
    bounds = torch.cat([first.nonzero().flatten(), torch.tensor([num_slots])])
    start = torch.repeat_interleave(bounds[:-1], bounds.diff())
    if (padding != -1).any() or (doc < 0).any() or (doc[1:] < doc[:-1]).any():
        raise ConfigError(
            "batch.doc",
            _brief(batch.doc),
            "document numbers must ascend, with -1 only at the end",
            "Lay documents end to end and pad behind them.",
        )
    if (pos != torch.arange(num_slots) - start).any():
        raise ConfigError(
            "batch.pos",
            _brief(batch.pos),
            "positions must count from 0 in each document",
            "Give slot t of a document position t.",
        )
    return bounds


def _shift_mask(mask: Tensor, slots: Tensor, last: Tensor, step: int) -> Tensor:
    """Slots t whose slot t + step lies in the same document and is supervised."""
    ahead = slots + step
    return (ahead <= last) & mask[ahead.clamp(max=max(len(mask) - 1, 0))]


def _document_suffixes(scored: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Slots from each document's first scored one to its end, and the cumulative count of them by document."""
    seen = torch.cat([torch.zeros(1, dtype=torch.long), scored.cumsum(0)])  # scored slots before slot i
    before = torch.repeat_interleave(seen[bounds[:-1]], bounds.diff())  # scored slots before the slot's document
    chosen = seen[1:] > before
    counts = torch.cat([torch.zeros(1, dtype=torch.long), chosen.cumsum(0)])
    return chosen.nonzero().flatten(), counts[bounds]


def _lengths(bounds: tuple[int, ...]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(bounds)]


def _brief(values: Tensor) -> str:
    head = ", ".join(str(int(v)) for v in values[:12])
    return f"[{head}{', ...' if len(values) > 12 else ''}]"
