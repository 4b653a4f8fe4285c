"""Samples laid end to end into micro-batches. Which samples share one is a pure function of their lengths, in order."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.stream.files import StoredSample, read_slots
from eagle3_lightning.stream.sample import RowCopies, SampleRows, num_slots, supervised

_MAX_READERS = 4
_PIECE_BYTES = 8 << 20  # of rows that are read at a time, if a sample is not larger: they stay in the caches
_POOL_BYTES = 64 << 20  # of a pack: more readers for less take more of Python's time than they save


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
    slots = [num_slots(sample.num_rows) for sample in samples]
    ends = list(accumulate(slots))
    starts = [end - count for count, end in zip(slots, ends, strict=True)]
    hidden_size, dtype, used = samples[0].hidden_size, samples[0].dtype, ends[-1]
    with torch.inference_mode(False):  # which is a thread's own: the pool could not write to what is made in it
        batch = empty_batch(used if pad_to is None else pad_to, num_aux, hidden_size, dtype)
    batch.sample_ids.extend(sample.index for sample in samples)
    # NumPy's small operations keep Python's lock; torch's give it away, and the training step waits to have it back
    batch.ids.numpy()[:used] = list(chain.from_iterable(sample.token_ids[1 : sample.num_rows] for sample in samples))
    batch.mask.numpy()[:used] = np.concatenate([supervised(sample.spans, sample.num_rows)[1:] for sample in samples])
    batch.doc.numpy()[:used] = np.repeat(np.arange(len(samples)), slots)
    batch.pos.numpy()[:used] = np.arange(used) - np.repeat(starts, slots)

    def fill(piece: range) -> None:
        here = slice(starts[piece[0]], ends[piece[-1]])
        _copy_slots([samples[doc] for doc in piece], batch.features[here], batch.teacher[here])

    row_bytes = (num_aux + 1) * hidden_size * dtype.itemsize
    is_small = used * row_bytes < _POOL_BYTES
    for _ in (map if pool is None or is_small else pool.map)(fill, _pieces(samples, row_bytes)):
        pass
    return batch


def _pieces(samples: Sequence[SampleRows], row_bytes: int) -> Iterator[range]:
    """Samples that are copied together: alike, and not too many."""
    first, size_bytes, form = 0, 0, None
    for doc, sample in enumerate(samples):
        size_bytes += sample.num_rows * row_bytes
        its_form = sample.form if isinstance(sample, StoredSample) else type(sample)
        if doc > first and (size_bytes > _PIECE_BYTES or its_form != form):
            yield range(first, doc)
            first, size_bytes = doc, sample.num_rows * row_bytes
        form = its_form
    yield range(first, len(samples))


def _copy_slots(samples: Sequence[SampleRows], features: Float[Tensor, "T A H"], teacher: Float[Tensor, "T H"]) -> None:
    if isinstance(samples[0], StoredSample):
        read_slots(cast(Sequence[StoredSample], samples), features, teacher)
        return
    start, num_aux = 0, features.shape[1]
    for sample in cast(Sequence[RowCopies], samples):
        here = slice(start, start + num_slots(sample.num_rows))
        sample.copy_rows(0, slice(num_aux), features[here])
        sample.copy_rows(1, slice(num_aux, None), teacher[here].unsqueeze(1))
        start = here.stop


def empty_batch(num_slots: int, num_aux: int, hidden_size: int, dtype: torch.dtype) -> Eagle3Batch:
    """A batch of padding alone: what a rank without a pack trains on in the last round."""
    return Eagle3Batch(
        ids=torch.zeros(num_slots, dtype=torch.int64),
        features=_zeros((num_slots, num_aux, hidden_size), dtype),
        teacher=_zeros((num_slots, hidden_size), dtype),
        mask=torch.zeros(num_slots, dtype=torch.bool),
        doc=torch.full((num_slots,), -1, dtype=torch.int64),
        pos=torch.zeros(num_slots, dtype=torch.int64),
        sample_ids=[],
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of pages that the kernel zeroes when they are written to: torch would write them twice, with all its threads."""
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)
