"""Where finished samples come from: vLLM through the queue, the disk, or one after the other.

A feed gives the samples of a stream in the order of their index. With a cache, rank 0 asks vLLM only for rows that are
not on disk and says of the others that they are (`Stored`), so that all ranks agree without looking; each rank keeps
the samples that it assembles. When an epoch ends with every row on disk, vLLM is let go.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from eagle3_lightning.errors import SampleError
from eagle3_lightning.prompts.requests import RequestStream
from eagle3_lightning.stream.files import StoredSample
from eagle3_lightning.stream.foreign import PtSample
from eagle3_lightning.stream.messages import Dropped, DropReason, Ready, Stats, Stored, Stream, Submit
from eagle3_lightning.stream.queue import QueueStats, SampleQueue
from eagle3_lightning.stream.sample import FinishedSample
from eagle3_lightning.stream.store import SampleStore

if TYPE_CHECKING:
    from eagle3_lightning.extract.supervisor import Extractor

AnySample = FinishedSample | StoredSample | PtSample
Loader = Callable[[Stream, int], StoredSample | PtSample | Dropped]
HasAll = Callable[[Stream, Iterable[int]], bool]
_POLL_S = 0.2
_MIN_SAMPLES_FOR_SHARE = 100
_NUM_NAMED = 5
_log = logging.getLogger(__name__)


class DiskFeed:
    """Samples that all lie on disk."""

    ready: Ready | None = None

    def __init__(self, load: Loader, pack_tokens: int, max_dropped_share: float) -> None:
        """Read nothing yet.

        Args:
            load: stream and index to sample.
            pack_tokens: slots of a pack; longer samples are dropped.
            max_dropped_share: more samples dropped than this share is an error.
        """
        self._load, self._pack_tokens, self._max_dropped_share = load, pack_tokens, max_dropped_share
        self._next: dict[Stream, int] = {}
        self._stop: dict[Stream, int | None] = {}
        self._taken = self._cut = 0
        self._dropped: Counter[DropReason] = Counter()
        self._names: dict[DropReason, list[str]] = {}

    def begin(self, stream: Stream, start: int, stop: int | None) -> None:
        """Start a stream at `start`, up to `stop` or without end."""
        self._next[stream], self._stop[stream] = start, stop

    def wait_ready(self, timeout_s: float) -> Ready | None:
        """Nothing has to start."""
        return None

    def get(self, stream: Stream) -> AnySample | Dropped | None:
        """The next sample of the stream; None behind the last."""
        index = self._next[stream]
        if index == self._stop[stream]:
            return None
        self._next[stream] = index + 1
        return self.take(stream, index)

    def take(self, stream: Stream, index: int) -> AnySample | Dropped:
        """One sample, counted."""
        item = self._load(stream, index)
        if not isinstance(item, Dropped) and item.num_rows - 1 > self._pack_tokens:
            detail = f"{item.num_rows} tokens are over data.batch.pack_tokens = {self._pack_tokens}"
            item = Dropped(stream, index, item.name, "too_long", detail)
        if isinstance(item, Dropped):
            self._count(item)
        else:
            self._taken += 1
            self._cut += _was_cut(item)
        return item

    def discard(self, sample: AnySample, reason: DropReason, detail: str) -> None:
        """Count a sample that cannot be trained on after all."""
        self._taken -= 1
        self._cut -= _was_cut(sample)
        self._count(Dropped(sample.stream, sample.index, sample.name, reason, detail))

    def keep(self, pack: Sequence[AnySample]) -> None:
        """It is on disk already."""

    def assembled(self, next_sample: int) -> None:
        """Nobody waits for it."""

    def stats(self) -> QueueStats:
        """The counters as of now."""
        dropped, names = dict(self._dropped), {reason: list(n) for reason, n in self._names.items()}
        return QueueStats(0, 0, 0, 0.0, self._taken, self._cut, 0, dropped, names, Stats(), 0)

    def close(self) -> None:
        """Nothing is open."""

    def join(self) -> None:
        """Nothing is running."""

    def _count(self, item: Dropped) -> None:
        self._dropped[item.reason] += 1
        names = self._names.setdefault(item.reason, [])
        if len(names) < _NUM_NAMED:
            names.append(f"{item.stream} {item.index} ({item.name}): {item.detail}")
            _log.warning("dropped %s sample %d as %s: %s", item.stream, item.index, item.reason, item.detail)
        num_dropped = self._dropped.total()
        total = num_dropped + self._taken
        if total >= _MIN_SAMPLES_FOR_SHARE and num_dropped > self._max_dropped_share * total:
            named = "; ".join(f"{reason}: {n[0]}" for reason, n in self._names.items())
            raise SampleError(
                f"{num_dropped} of {total} samples were dropped, more than data.queue.max_dropped_share = "
                f"{self._max_dropped_share}. {named}"
            )


def _was_cut(sample: AnySample) -> bool:
    return sample.finish_reason == "length" and len(sample.token_ids) > sample.prompt_tokens


class QueueFeed:
    """Samples that vLLM makes, and those of a store beside them."""

    def __init__(
        self,
        queue: SampleQueue,
        extractor: "Extractor | None",
        streams: dict[Stream, RequestStream],
        store: SampleStore | None,
        disk: DiskFeed | None,
        alone: bool,
    ) -> None:
        """Take over a running queue.

        Args:
            queue: of this rank.
            extractor: on rank 0, which feeds; None on the others.
            streams: the requests.
            store: keeps what is made; None keeps nothing.
            disk: reads the store.
            alone: there is no other rank, which might still read the arena when this one is through with it.
        """
        self.ready: Ready | None = None
        self._queue, self._extractor, self._streams = queue, extractor, streams
        self._store, self._disk, self._alone = store, disk, alone
        self._only_disk = False
        self._closing = threading.Event()
        self._next: dict[Stream, int] = {}
        self._assembled = -1

    def begin(self, stream: Stream, start: int, stop: int | None) -> None:
        """Start a stream at `start`, up to `stop` or without end."""
        self._next[stream] = start
        if self._extractor is not None:
            requests = self._streams[stream].requests(start, stop)
            self._queue.feed(stream, requests if self._store is None else self._missing(stream, start, stop), start)

    def wait_ready(self, timeout_s: float) -> Ready | None:
        """Wait for the engine. Raises ProducerError if it does not come up."""
        self.ready = self._queue.wait_ready(timeout_s)
        return self.ready

    def get(self, stream: Stream) -> AnySample | Dropped | None:
        """The next sample of the stream; None behind the last.

        Raises:
            ProducerError: the producer died or made no progress.
            SampleError: too many samples were dropped.
        """
        if self._only_disk and stream == "train":
            assert self._disk is not None
            return self._disk.get(stream)
        item = self._queue.get(stream)
        if item is not None:
            self._next[stream] = item.index + 1
        if self._store is None:
            assert not isinstance(item, Stored)
            return item
        if item is None and stream == "train":
            return self._go_on_from_disk()
        if isinstance(item, Stored):
            assert self._disk is not None
            return self._disk.take(stream, item.index)
        if isinstance(item, Dropped) and self._extractor is not None:
            self._store.drop(self._streams[stream].row_id(item.index), item)
        return item

    def discard(self, sample: AnySample, reason: DropReason, detail: str) -> None:
        """Give back and count a sample that cannot be trained on after all."""
        if self._store is not None and self._extractor is not None:
            row = self._streams[sample.stream].row_id(sample.index)
            self._store.drop(row, Dropped(sample.stream, sample.index, sample.name, reason, detail))
        if isinstance(sample, FinishedSample):
            self._queue.discard(sample, reason, detail)
        elif self._disk is not None:
            self._disk.discard(sample, reason, detail)

    def keep(self, pack: Sequence[AnySample]) -> None:
        """Write the samples of a pack, which have not given their rows back, to the store."""
        if self._store is None:
            return
        for sample in pack:
            if isinstance(sample, FinishedSample):
                self._store.write(self._streams[sample.stream].row_id(sample.index), sample)

    def assembled(self, next_sample: int) -> None:
        """Note that this rank has assembled all training samples before this one."""
        self._assembled = next_sample

    def stats(self) -> QueueStats:
        """The counters as of now, samples from the disk included."""
        made = self._queue.stats()
        if self._disk is None:
            return made
        read = self._disk.stats()
        dropped = dict(Counter(made.dropped) + Counter(read.dropped))
        names = {r: [*made.dropped_names.get(r, ()), *read.dropped_names.get(r, ())][:_NUM_NAMED] for r in dropped}
        taken, cut = made.taken + read.taken, made.cut + read.cut
        return replace(made, taken=taken, cut=cut, dropped=dropped, dropped_names=names)

    def close(self) -> None:
        """End every wait; the engine is ended by `join`, when nobody reads the arena any more."""
        self._closing.set()
        self._queue.close()

    def join(self) -> None:
        """End vLLM, and bring the index of the store up to date."""
        if self._extractor is not None:
            self._extractor.close()
            if self._store is not None:
                self._store.write_indexes()

    def _missing(self, stream: Stream, start: int, stop: int | None) -> Iterator[Submit | Dropped | Stored]:
        """In the feeder's thread: requests for what is not on disk; an end where an epoch can go on without vLLM."""
        assert self._store is not None
        requests = self._streams[stream]
        for index, record in requests.records(start, stop):
            if stream == "train" and index > start and index % requests.epoch_size == 0 and self._is_complete(index):
                return
            row = requests.row_id(index)
            if self._store.has(stream, row):
                yield Stored(stream, index, f"row {row}")
            else:
                yield requests.request(index, record)

    def _is_complete(self, index: int) -> bool:
        """At an epoch's end: whether every row is on disk, once all of the epoch has been assembled."""
        assert self._store is not None
        num_rows = self._streams["train"].num_rows
        if num_rows is None:
            return False
        while not self._closing.is_set() and not self._store.is_full:
            if self._store.has_all("train", range(num_rows)):
                return True
            if self._assembled >= index:
                return False  # the sources have weights, and some rows have not come yet
            time.sleep(_POLL_S)
        return False

    def _go_on_from_disk(self) -> AnySample | Dropped | None:
        """Every rank gets here at the same sample: the feeder of rank 0 has ended the stream."""
        assert self._disk is not None
        self._disk.begin("train", self._next["train"], None)
        self._only_disk = True
        if self._extractor is not None:
            _log.info("all samples are on disk: vLLM is not needed any more and ends")
            if self._alone:
                self._extractor.close()
            else:
                self._extractor.end_producer()
        return self._disk.get("train")


def is_complete(has_all: HasAll, streams: dict[Stream, RequestStream], max_val_samples: int) -> bool:
    """Whether a store, of which `has_all` tells, holds all that the streams will ever ask for."""
    num_rows = streams["train"].num_rows
    if num_rows is None or not has_all("train", range(num_rows)):
        return False
    if "val" not in streams:
        return True
    val = streams["val"]
    return val.num_rows is not None and has_all(
        "val", (val.row_id(index) for index in range(min(val.epoch_size, max_val_samples)))
    )
