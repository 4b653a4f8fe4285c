"""Samples laid end to end into micro-batches. Which samples share one is a pure function of their lengths, in order."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.stream.sample import SampleRows

_MAX_READERS = 4


def num_slots(num_rows: int) -> int:
    """Slots of a document of `num_rows` tokens with states: each token but the first, beside the states before it."""
    return num_rows - 1


class Packer:
    """Fills packs in order and closes one when the next sample does not fit, so that every boundary is a clean cut.

    With several ranks, every rank packs every sample; pack p is assembled by rank p % world_size alone, and the others
    release its samples.
    """

    def __init__(self, pack_tokens: int, static_shapes: bool, num_aux: int) -> None:
        """An empty pack.

        Args:
            pack_tokens: slots of a pack.
            static_shapes: pad every batch to `pack_tokens` slots.
            num_aux: auxiliary layers A; the row's layer A is the last.
        """
        self.pack_tokens = pack_tokens
        self.static_shapes = static_shapes
        self.num_aux = num_aux
        self._open: list[SampleRows] = []
        self._used = 0
        self._pool = ThreadPoolExecutor(min(_MAX_READERS, os.cpu_count() or 1), "eagle3-samples")

    def add(self, sample: SampleRows) -> list[SampleRows] | None:
        """Append a sample.

        Returns:
            The pack that it closed by not fitting in, or None.
        """
        slots = num_slots(sample.num_rows)
        assert 0 < slots <= self.pack_tokens, f"sample {sample.index} has {slots} slots, a pack {self.pack_tokens}"
        closed = self.flush() if self._used + slots > self.pack_tokens else None
        self._open.append(sample)
        self._used += slots
        return closed

    def flush(self) -> list[SampleRows] | None:
        """Close the open pack, if it holds anything, and return it."""
        closed, self._open, self._used = self._open, [], 0
        return closed or None

    def assemble(self, samples: Sequence[SampleRows]) -> Eagle3Batch:
        """Copy a closed pack out of the arena and release its blocks."""
        batch = assemble(samples, self.num_aux, self.pack_tokens if self.static_shapes else None, self._pool)
        for sample in samples:
            sample.release()
        return batch


def assemble(
    samples: Sequence[SampleRows], num_aux: int, pad_to: int | None, pool: ThreadPoolExecutor | None = None
) -> Eagle3Batch:
    """One micro-batch from samples, as Eagle3Batch defines it.

    Args:
        samples: with readable rows; they are not released.
        num_aux: auxiliary layers A.
        pad_to: slots of the batch, the rest padded; None for no padding.
        pool: reads several samples at once.
    """
    ends = list(accumulate(num_slots(sample.num_rows) for sample in samples))
    hidden_size, dtype = samples[0].hidden_size, samples[0].dtype
    with torch.inference_mode(False):  # which is a thread's own: the pool could not write to what is made in it
        batch = empty_batch(ends[-1] if pad_to is None else pad_to, num_aux, hidden_size, dtype)
    batch.sample_ids.extend(sample.index for sample in samples)

    def fill(doc: int) -> None:
        sample = samples[doc]
        slots = num_slots(sample.num_rows)
        here = slice(ends[doc] - slots, ends[doc])
        batch.ids[here] = torch.tensor(sample.token_ids[1 : sample.num_rows])
        sample.copy_rows(0, slice(num_aux), batch.features[here])
        sample.copy_rows(1, slice(num_aux, None), batch.teacher[here].unsqueeze(1))
        batch.mask[here] = supervised(sample.spans, sample.num_rows)[1:]
        batch.doc[here] = doc
        batch.pos[here] = torch.arange(slots)

    for _ in (map if pool is None else pool.map)(fill, range(len(samples))):
        pass
    return batch


def empty_batch(num_slots: int, num_aux: int, hidden_size: int, dtype: torch.dtype) -> Eagle3Batch:
    """A batch of padding alone: what a rank without a pack trains on in the last round."""
    return Eagle3Batch(
        ids=torch.zeros(num_slots, dtype=torch.int64),
        features=torch.zeros(num_slots, num_aux, hidden_size, dtype=dtype),
        teacher=torch.zeros(num_slots, hidden_size, dtype=dtype),
        mask=torch.zeros(num_slots, dtype=torch.bool),
        doc=torch.full((num_slots,), -1, dtype=torch.int64),
        pos=torch.zeros(num_slots, dtype=torch.int64),
        sample_ids=[],
    )


def supervised(spans: Sequence[tuple[int, int]], num_rows: int) -> Tensor:
    """[S] bool: whether token i lies in a supervised span."""
    mask = torch.zeros(num_rows, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return mask
