"""Where the rows of a forward pass go in the arena, and how many rows of each request are there without a gap.

Independent of vLLM: the tap tells it which requests a step ran, in row order, and from which position each.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eagle3_lightning.stream.arena import GAP, NOBODY, NUM_COUNTERS, Arena

IntArray = NDArray[np.int64]


@dataclass
class StepRows:
    """The rows of one forward pass that belong to captured requests.

    Attributes:
        source: [n] which rows of the step; None if all of them in order.
        dest: [n] their places in the arena.
        requests: [m, 5] of first block, serial, first position, rows, rows that its blocks can take, for every captured
            request of the step.
        counters: as the arena keeps them, this step included.
    """

    source: Tensor | None
    dest: Tensor
    requests: IntArray
    counters: IntArray


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
        self._headers, self._arena_counters = arena.headers.numpy(), arena.counters.numpy()
        self._slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_requests))
        self._serials = np.zeros(max_requests, np.int64)
        self._limit = np.zeros(max_requests, np.int64)
        self._prompt_tokens = np.zeros(max_requests, np.int64)
        self._counters = np.zeros(NUM_COUNTERS, np.int64)
        self._blocks = np.zeros((max_requests, 16), np.int64)

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
        if len(blocks) > self._blocks.shape[1]:
            wider = np.zeros((len(self._serials), 2 * len(blocks)), np.int64)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        self._serials[slot], self._prompt_tokens[slot] = serial, prompt_tokens
        self._limit[slot] = len(blocks) * self._arena.layout.block_tokens
        self._blocks[slot, : len(blocks)] = blocks

    def forget(self, request_id: str) -> None:
        """The request is finished or aborted; ids that were never begun are fine."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)

    def close(self) -> None:
        """Unmap the arena; no step may be under way."""
        self._ids = self._finite = self._headers = self._arena_counters = np.empty(0)
        self._arena.close()

    def _take_slot(self) -> int:
        if not self._free_slots:
            size = len(self._serials)
            self._free_slots = list(range(size, 2 * size))
            for name in ("_serials", "_limit", "_prompt_tokens", "_blocks"):
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
        slots = np.array([self._slot_of.get(r, -1) for r in request_ids], np.int64)
        captured = slots >= 0
        if not captured.any():
            return None
        if len(slots) == (num_all := int(num_tokens.sum())):  # one token each, as in most steps
            slot, position = slots, first_position
        else:
            request = np.repeat(np.arange(len(slots)), num_tokens)
            starts = np.cumsum(num_tokens) - num_tokens
            slot, position = slots[request], np.arange(num_all) - starts[request] + first_position[request]
        keep = (slot >= 0) & (position < self._limit[slot])
        source = None
        if not keep.all():
            source = torch.from_numpy(np.flatnonzero(keep))
            slot, position = slot[keep], position[keep]
        block, offset = np.divmod(position, self._arena.layout.block_tokens)
        dest = self._blocks[slot, block] * self._arena.layout.block_tokens + offset
        slots, num_tokens, first_position = slots[captured], num_tokens[captured], first_position[captured]
        num_prompt = np.clip(self._prompt_tokens[slots] - first_position, 0, num_tokens).sum()
        self._counters += (num_prompt, num_tokens.sum() - num_prompt, 1)
        about = (self._blocks[slots, 0], self._serials[slots], first_position, num_tokens, self._limit[slots])
        return StepRows(source, torch.from_numpy(dest), np.stack(about, axis=1), self._counters.copy())

    def write(self, step: StepRows, rows: Tensor | Sequence[Tensor], ids: IntArray, finite: NDArray[np.bool_]) -> None:
        """Copy the rows of a step, then say in the headers that they are there.

        The rows are the only torch operation: each gives Python's lock away and has to wait for it again, in turns with
        the thread that runs vLLM.

        Args:
            step: from `plan`.
            rows: [n, L, H], or L tensors [n, H], on the CPU; all rows of the step.
            ids: [n] token ids that the step was fed.
            finite: [n] whether all values of a row are finite.
        """
        parts = (
            [(self._arena.rows, rows)]
            if isinstance(rows, Tensor)
            else zip(self._arena.rows.unbind(1), rows, strict=True)
        )
        for place, values in parts:
            place.index_copy_(0, step.dest, values if step.source is None else values.index_select(0, step.source))
        source = slice(None) if step.source is None else step.source.numpy()
        dest = step.dest.numpy()
        self._ids[dest] = ids[source]
        self._finite[dest] = finite[source]
        self._advance(step.requests)
        self._arena_counters[:] = step.counters

    def _advance(self, requests: IntArray) -> None:
        # What is there already is read from the header, so that a step which was never written leaves its gap.
        first_block, serial, first_position, num_rows, limit = requests.T
        headers = self._headers
        new_owner = headers[first_block, 0] != serial
        before = np.where(new_owner, 0, headers[first_block, 1])
        after = np.minimum(np.maximum(before, first_position + num_rows), limit)
        after[(first_position > before) | (before == GAP)] = GAP
        # A reader must never see the new serial beside the old owner's count.
        headers[first_block[new_owner], 0] = NOBODY
        headers[first_block, 1] = after
        headers[first_block[new_owner], 0] = serial[new_owner]
