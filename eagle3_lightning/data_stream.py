"""From finished samples to the batches that Lightning steps on: rounds of packs, made ahead of time, counted by step.

A round is one pack for every rank. Ranks see the same samples in the same order and close the same packs, so they agree
on the rounds without a word; rank r assembles pack r of a round and gives the others back. Nothing here knows vLLM.
"""

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.data_feed import AnySample
from eagle3_lightning.errors import SampleError
from eagle3_lightning.stream.messages import Dropped, DropReason, Stream
from eagle3_lightning.stream.packer import Packer, empty_batch

_WAKE_S = 0.5


class SampleReader(Protocol):
    """The part of a feed (data_feed.py) that is used here."""

    def get(self, stream: Stream) -> AnySample | Dropped | None:
        """The next sample of a stream; None behind the last."""
        ...

    def discard(self, sample: AnySample, reason: DropReason, detail: str) -> None:
        """Give a sample back that cannot be trained on, and count it."""
        ...

    def keep(self, pack: Sequence[AnySample]) -> None:
        """Called with each pack of this rank, while its rows can be read."""
        ...

    def assembled(self, next_sample: int) -> None:
        """Called at the end of an epoch of training samples, with the index of the next one."""
        ...


@dataclass(frozen=True)
class Round:
    """One micro-batch of this rank, and where the stream stands behind it.

    Attributes:
        batch: this rank's pack; padding alone where the epoch had no pack left for it.
        first_sample: index of the first sample of the round, over all ranks.
        next_sample: index of the first sample behind the round.
        last: whether it ends an epoch.
    """

    batch: Eagle3Batch
    first_sample: int
    next_sample: int
    last: bool


class RoundMaker:
    """Packs the samples of a stream into rounds, epoch after epoch."""

    def __init__(
        self,
        reader: SampleReader,
        stream: Stream,
        packer: Packer,
        start: int,
        epoch_size: int,
        rank: int,
        world_size: int,
        filler: Callable[[int], Eagle3Batch],
        on_sample: Callable[[AnySample], None] | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            reader: where the samples come from.
            stream: which of its streams.
            packer: closes packs.
            start: index of the first sample that the reader will give.
            epoch_size: samples of an epoch; packs do not cross its end.
            rank: of this process.
            world_size: of the run.
            filler: makes a batch of padding with the given number of slots.
            on_sample: called with every sample that is used, before its rows are given back.
        """
        self._reader, self._stream, self._packer = reader, stream, packer
        self._next, self._epoch_size = start, epoch_size
        self._rank, self._world_size = rank, world_size
        self._filler, self.on_sample = filler, on_sample
        self._mine: Eagle3Batch | None = None
        self._first = start
        self._num_packs = 0  # of the open round

    def __iter__(self) -> Iterator[Round]:
        """Rounds without end, or until the stream ends."""
        used = 0
        while True:
            item = self._reader.get(self._stream)
            if item is None:
                if self._next % self._epoch_size:
                    yield from self._close_epoch()
                return
            self._next = item.index + 1
            if not isinstance(item, Dropped) and self._usable(item):
                used += 1
                yield from self._add(item)
            if self._next % self._epoch_size == 0:
                if not used:
                    raise SampleError(
                        f"all {self._epoch_size} samples of an epoch of the {self._stream} stream were dropped; the "
                        "log names the first of each reason"
                    )
                used = 0
                yield from self._close_epoch()

    def _usable(self, sample: AnySample) -> bool:
        """Whether any slot is supervised: some token behind the first, with a state, lies in a span."""
        if any(max(start, 1) < min(end, sample.num_rows) for start, end in sample.spans):
            return True
        self._reader.discard(
            sample,
            "empty_mask",
            f"the answer has {len(sample.token_ids) - sample.prompt_tokens} tokens, and "
            "none of them is both supervised and followed by another",
        )
        return False

    def _add(self, sample: AnySample) -> Iterator[Round]:
        if self.on_sample is not None:
            self.on_sample(sample)
        closed = self._packer.add(sample)
        if closed is not None:
            yield from self._take(cast(list[AnySample], closed), next_sample=sample.index, last=False)

    def _take(self, pack: list[AnySample], next_sample: int, last: bool) -> Iterator[Round]:
        if self._num_packs == self._rank:
            self._reader.keep(pack)
            self._mine = self._packer.assemble(pack)
        else:
            for sample in pack:
                sample.release()
        self._num_packs += 1
        if self._num_packs == self._world_size or last:
            batch = self._mine if self._mine is not None else self._filler(self._padding_slots())
            yield Round(batch, self._first, next_sample, last)
            self._mine, self._num_packs, self._first = None, 0, next_sample

    def _padding_slots(self) -> int:
        return self._packer.pack_tokens if self._packer.static_shapes else 1

    def _close_epoch(self) -> Iterator[Round]:
        # The pack that is open holds the epoch's last usable sample, so that there is always one to close.
        pack = self._packer.flush()
        if pack is not None:
            yield from self._take(cast(list[AnySample], pack), next_sample=self._next, last=True)
        if self._stream == "train":
            self._reader.assembled(self._next)


def make_filler(num_aux: int, hidden_size: int, dtype: torch.dtype) -> Callable[[int], Eagle3Batch]:
    """A function that makes batches of padding alone, like the real ones in all but content."""
    return lambda num_slots: empty_batch(num_slots, num_aux, hidden_size, dtype)


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Prefetcher:
    """Runs an iterator in a thread, a few items ahead; an exception of it comes out where its item would have."""

    def __init__(self, items: Iterator[Round], depth: int, pin: bool) -> None:
        """Start the thread.

        Args:
            items: what to run; only the thread touches it from here on.
            depth: items that wait at most.
            pin: move batches to page-locked memory in the thread.
        """
        self._items, self._pin = items, pin
        self._ready: queue.Queue[Round | _Failed | None] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self.wait_s = 0.0
        self._thread = threading.Thread(target=self._run, name="eagle3-batches", daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Items that wait now."""
        return self._ready.qsize()

    def get(self) -> Round | None:
        """The next item; None behind the last. Waits as long as the iterator itself may: the queue has the deadline."""
        started_s = time.monotonic()
        while True:
            try:
                item = self._ready.get(timeout=_WAKE_S)
                break
            except queue.Empty:
                if not self._thread.is_alive() and self._ready.empty():
                    raise RuntimeError("the thread that assembles batches has ended without a word") from None
        self.wait_s += time.monotonic() - started_s
        if isinstance(item, _Failed):
            raise item.error
        return item

    def stop(self) -> None:
        """Ask the thread to end; it does so behind the item that it is making. `join` waits for it."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, which ends soon once its iterator's source has been closed."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for item in self._items:
                if self._pin:
                    item = Round(item.batch.pin_memory(), item.first_sample, item.next_sample, item.last)
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:  # whatever it was, the training loop must learn of it
            self._put(_Failed(error))

    def _put(self, item: Round | _Failed | None) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=_WAKE_S)
                return True
            except queue.Full:
                continue
        return False


class StepLedger:
    """Where the stream stands behind each optimizer step: what a checkpoint must say, whatever was prefetched.

    Lightning steps when `accumulate` batches of an epoch have come, and at the epoch's last batch.

    Attributes:
        start: the next sample at the ledger's beginning.
    """

    def __init__(self, step: int, next_sample: int, batches: int) -> None:
        """Start from a checkpoint or from nothing.

        Args:
            step: optimizer steps made before.
            next_sample: index of the first sample not yet trained on.
            batches: batches of the running epoch that were trained on.
        """
        self._step, self._batches = step, batches
        self.start = next_sample
        self._positions: OrderedDict[int, tuple[int, int]] = OrderedDict({step: (next_sample, batches)})

    @property
    def batches(self) -> int:
        """Batches of the running epoch that were handed out."""
        return self._batches

    def handed_out(self, round_: Round, last: bool, accumulate: int) -> None:
        """Note a batch that the trainer has been given.

        Args:
            round_: the batch.
            last: whether Lightning ends its epoch with it.
            accumulate: batches to one step.
        """
        self._batches += 1
        if last or self._batches % accumulate == 0:
            self._step += 1
            self._batches = 0 if last else self._batches
            self._positions[self._step] = (round_.next_sample, self._batches)

    def at(self, step: int) -> tuple[int, int]:
        """Next sample and batches of the epoch behind optimizer step `step`; older steps are forgotten.

        Raises:
            RuntimeError: the trainer has made more steps than batches were given for, or fewer than before.
        """
        if step not in self._positions:
            raise RuntimeError(
                f"the trainer is at step {step} and its batches lead to steps {list(self._positions)}; only one "
                "optimizer with automatic optimization can be resumed"
            )
        while next(iter(self._positions)) < step:
            self._positions.popitem(last=False)
        return self._positions[step]

    def rewind(self, step: int) -> int:
        """Forget what was handed out behind optimizer step `step` and not trained on. Returns the next sample there."""
        next_sample, batches = self.at(step)
        self._step, self._batches = step, batches
        self._positions = OrderedDict({step: (next_sample, batches)})
        return next_sample
