"""Where the rows of a forward pass go in the arena, and how many rows of each request are there without a gap.

Independent of vLLM: the tap tells it which requests a step ran, in row order, and from which position each.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3_lightning.stream.arena import GAP, NOBODY, Arena

IntArray = NDArray[np.int64]


@dataclass
class StepRows:
    """The rows of one forward pass that belong to captured requests.

    Attributes:
        num_rows: rows of the step, wanted or not.
        source: [n] which of them; None if all of them in order.
        dest: [n] their places in the arena.
        requests: [m, 4] of serial, first block, rows that its blocks can take and rows of its prompt, for every
            captured request of the step.
        first_position: [m] the first row's position in its request.
        num_tokens: [m] rows of each.
    """

    num_rows: int
    source: IntArray | None
    dest: IntArray
    requests: IntArray
    first_position: IntArray
    num_tokens: IntArray


_LIMIT, _PROMPT_TOKENS = 2, 3  # columns of `requests`


def _joined(steps: Sequence[StepRows]) -> tuple[IntArray | None, IntArray]:
    """Which rows of all steps together are wanted (None: all of them), and their places in the arena."""
    dest = np.concatenate([step.dest for step in steps])
    if all(step.source is None for step in steps):
        return None, dest
    starts = itertools.accumulate((step.num_rows for step in steps[:-1]), initial=0)
    wanted = [
        start + (np.arange(step.num_rows) if step.source is None else step.source)
        for start, step in zip(starts, steps, strict=True)
    ]
    return np.concatenate(wanted), dest


def _runs(steps: Sequence[StepRows]) -> Iterator[tuple[IntArray, IntArray, IntArray]]:
    """Requests, first positions and numbers of rows, those of steps that go on without a gap as if of one step."""
    last: tuple[IntArray, IntArray, IntArray] | None = None
    for step in steps:
        this = step.requests, step.first_position, step.num_tokens
        if last is not None:
            requests, first_position, num_tokens = last
            if requests is this[0] and np.array_equal(this[1], first_position + num_tokens):
                last = requests, first_position, num_tokens + this[2]
                continue
            yield last
        last = this
    if last is not None:
        yield last


class RowWriter:
    """Keeps each request's blocks, also while it is preempted, until the scheduler says that it is finished.

    `plan` runs between the phases of a step and is all numpy, since it stands in the way of the next step; `write` may
    run later in another thread, in the order of the steps.
    """

    def __init__(self, arena: Arena, max_requests: int = 256) -> None:
        """Write to `arena`.

        Args:
            arena: the trainer's.
            max_requests: first guess; the table grows.
        """
        self._arena = arena
        arena.counters.zero_()  # those of a producer that died are the hub's to remember
        self._ids, self._finite = arena.ids.numpy(), arena.finite.numpy()
        self._headers, self._counters = arena.headers.numpy(), arena.counters.numpy()
        self._slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_requests))
        self._requests = np.zeros((max_requests, 4), np.int64)
        self._blocks = np.zeros((max_requests, 16), np.int64)
        self._last_ids: Sequence[str] | None = None
        self._last_slots = np.empty(0, np.int64), np.empty(0, np.bool_), np.empty((0, 4), np.int64)

    def begin(self, request_id: str, serial: int, blocks: Sequence[int], prompt_tokens: int) -> None:
        """A request to capture. A second call for the same id (vLLM resumes it as if new) changes nothing.

        Args:
            request_id: vLLM's.
            serial: of the reservation.
            blocks: its arena blocks.
            prompt_tokens: rows that count as the prompt's.
        """
        slot = self._slot_of.get(request_id)
        if slot is None:
            slot = self._slot_of[request_id] = self._take_slot()
        self._last_ids = None
        if len(blocks) > self._blocks.shape[1]:
            wider = np.zeros((len(self._requests), 2 * len(blocks)), np.int64)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        self._requests[slot] = serial, blocks[0], len(blocks) * self._arena.layout.block_tokens, prompt_tokens
        self._blocks[slot, : len(blocks)] = blocks

    def forget(self, request_id: str) -> None:
        """The request is finished or aborted; ids that were never begun are fine."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)
            self._last_ids = None

    def close(self) -> None:
        """Unmap the arena; no step may be under way."""
        self._ids = self._finite = self._headers = self._counters = np.empty(0)
        self._arena.close()

    def _take_slot(self) -> int:
        if not self._free_slots:
            size = len(self._requests)
            self._free_slots = list(range(size, 2 * size))
            for name in ("_requests", "_blocks"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        return self._free_slots.pop()

    def plan(self, request_ids: Sequence[str], num_tokens: IntArray, first_position: IntArray) -> StepRows | None:
        """Places for the rows of a step.

        Args:
            request_ids: in the order of the rows.
            num_tokens: [m] rows of each.
            first_position: [m] position in its request of each one's first row.

        Returns:
            None if no request of the step is captured. Rows behind the reserved blocks are left out: vLLM may run one
            step more than the answer needs, and that row is nobody's.
        """
        slots, captured, requests = self._slots(request_ids)
        if not len(requests):
            return None
        num_all = int(num_tokens.sum())
        if len(slots) == num_all:  # one token each, as in most steps
            slot, position = slots, first_position
        else:
            request = np.repeat(np.arange(len(slots)), num_tokens)
            starts = np.cumsum(num_tokens) - num_tokens
            slot, position = slots[request], np.arange(num_all) - starts[request] + first_position[request]
        keep = (slot >= 0) & (position < self._requests[slot, _LIMIT])
        source = None
        if not keep.all():
            source = np.flatnonzero(keep)
            slot, position = slot[keep], position[keep]
        block, offset = np.divmod(position, self._arena.layout.block_tokens)
        dest = self._blocks[slot, block] * self._arena.layout.block_tokens + offset
        if len(requests) < len(slots):
            num_tokens, first_position = num_tokens[captured], first_position[captured]
        return StepRows(num_all, source, dest, requests, first_position, num_tokens)

    def _slots(self, request_ids: Sequence[str]) -> tuple[IntArray, NDArray[np.bool_], IntArray]:
        """The table's row of each request (-1: it has none), which have one, and those; as before for the same ids."""
        if request_ids != self._last_ids:
            self._last_ids = list(request_ids)
            slots = np.array([self._slot_of.get(r, -1) for r in request_ids], np.int64)
            captured = slots >= 0
            self._last_slots = slots, captured, self._requests[slots[captured]]
        return self._last_slots

    def write(
        self, steps: Sequence[StepRows], rows: Tensor | Sequence[Tensor], ids: IntArray, finite: NDArray[np.bool_]
    ) -> None:
        """Copy the rows of steps that followed each other, then say in the headers that they are there.

        The rows are the only torch operation: each gives Python's lock away and has to wait for it again, in turns with
        the thread that runs vLLM.

        Args:
            steps: from `plan`.
            rows: [n, L, H], or L tensors [n, H], on the CPU; all rows of the steps, one step after the other.
            ids: [n] token ids that the steps were fed.
            finite: [n] whether all values of a row are finite.
        """
        parts = (
            [(self._arena.rows, rows)]
            if isinstance(rows, Tensor)
            else zip(self._arena.rows.unbind(1), rows, strict=True)
        )
        source, places = _joined(steps)
        dest = torch.from_numpy(places)
        for place, values in parts:
            chosen = values if source is None else values.index_select(0, torch.from_numpy(source))
            place.index_copy_(0, dest, chosen)
        chosen_rows = slice(None) if source is None else source
        self._ids[places] = ids[chosen_rows]
        self._finite[places] = finite[chosen_rows]
        for requests, first_position, num_tokens in _runs(steps):
            self._advance(requests, first_position, num_tokens)
            num_rows = int(num_tokens.sum())
            num_prompt = int((requests[:, _PROMPT_TOKENS] - first_position).clip(0, num_tokens).sum())
            self._counters += (num_prompt, num_rows - num_prompt, 0)
        self._counters[2] += len(steps)

    def _advance(self, requests: IntArray, first_position: IntArray, num_tokens: IntArray) -> None:
        # What is there already is read from the header, so that a step which was never written leaves its gap.
        serial, first_block, limit, _ = requests.T
        headers = self._headers
        new_owner = headers[first_block, 0] != serial
        before = np.where(new_owner, 0, headers[first_block, 1])
        after = np.minimum(np.maximum(before, first_position + num_tokens), limit)
        after[(first_position > before) | (before == GAP)] = GAP
        # A reader must never see the new serial beside the old owner's count.
        headers[first_block[new_owner], 0] = NOBODY
        headers[first_block, 1] = after
        headers[first_block[new_owner], 0] = serial[new_owner]
