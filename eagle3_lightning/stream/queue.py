"""The trainer's end of the queue: samples in the order of their index, checked, counted, never waited for in vain."""

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from eagle3_lightning.errors import ProducerError, SampleError
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.channel import Channel, ChannelClosed
from eagle3_lightning.stream.facts import QueueHandle, QueueStats, since
from eagle3_lightning.stream.messages import (
    AnyMessage,
    Begin,
    Dropped,
    DropReason,
    End,
    Failed,
    Hello,
    Ready,
    Release,
    Sample,
    Starved,
    Stats,
    Stored,
    Stream,
    Submit,
)
from eagle3_lightning.stream.sample import FinishedSample, find_fault

log = logging.getLogger(__name__)
MIN_SAMPLES_FOR_SHARE = 100
NAMES_PER_REASON = 5
GIVE_WAY_AFTER_S = 0.05
_WAKE_S = 0.5


@dataclass
class _StreamState:
    next_index: int | None = None  # None until Begin
    count: int | None = None  # None until End
    is_fed_here: bool = False
    unanswered: int = 0
    ready: dict[int, FinishedSample | Dropped | Stored] = field(default_factory=dict)


@dataclass
class _Counters:
    """See QueueStats; `before` is what the producer had done when they began."""

    before: Stats = field(default_factory=Stats)
    wait_s: float = 0.0
    taken: int = 0
    cut: int = 0
    spilled: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    names: dict[DropReason, list[str]] = field(default_factory=dict)


class SampleQueue:
    """One per rank. `get` is for one thread per stream; a reader thread and, on rank 0, feeder threads do the rest."""

    def __init__(self, sock: socket.socket, arena: Arena, handle: QueueHandle) -> None:
        """Read from a connected socket; ranks other than 0 use `connect`.

        Args:
            sock: to the hub.
            arena: this process's mapping; not closed here.
            handle: see QueueHandle.
        """
        self._channel = Channel(sock)
        self._arena = arena
        self._handle = handle
        self._changed = threading.Condition()
        self._streams: dict[Stream, _StreamState] = {name: _StreamState() for name in get_args(Stream)}
        self._out: dict[int, FinishedSample] = {}  # delivered, blocks not given back yet
        self._ready: Ready | None = None
        self._starved: Starved | None = None
        self._starved_since_s = 0.0
        self._error: Exception | None = None
        self._last_progress_s = time.monotonic()
        self._producer = Stats()
        self._counted = _Counters()
        self._closed = False
        self._reader = threading.Thread(target=self._read, name="eagle3-queue", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, handle: QueueHandle, rank: int, pid: int) -> "SampleQueue":
        """Join as a rank other than 0.

        Args:
            handle: as rank 0's Extractor gives it.
            rank: of this process.
            pid: of this process.
        """
        assert handle.socket_path is not None, "the Extractor was made for one rank"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(handle.socket_path)
        queue = cls(sock, Arena.open(handle.arena_path, handle.arena_layout), handle)
        queue._channel.send(Hello(rank, pid))
        return queue

    # -- rank 0: what is to be made --------------------------------------------------------------------------------

    def feed(self, stream: Stream, requests: Iterator[Submit | Dropped | Stored], start_index: int = 0) -> None:
        """Submit requests from a thread in the background, never more than the window ahead of the answers.

        Args:
            stream: which stream they are.
            requests: in the order of their index, the first with `start_index`. An exception that it raises comes out
                of `get`.
            start_index: index of the first.
        """
        assert self._streams[stream].next_index is None, f"stream {stream} is fed already"
        self._streams[stream].is_fed_here = True
        self._channel.send(Begin(stream, start_index))
        thread = threading.Thread(
            target=self._feed, args=(stream, requests, start_index), daemon=True, name=f"eagle3-{stream}"
        )
        thread.start()

    def _feed(self, stream: Stream, requests: Iterator[Submit | Dropped], start_index: int) -> None:
        state, index = self._streams[stream], start_index
        try:
            for request in requests:
                assert request.index == index, f"request {request.index} of {stream} came where {index} was due"
                with self._changed:
                    while state.unanswered >= self._handle.window and not self._closed and self._error is None:
                        self._changed.wait(_WAKE_S)  # for answers; `get` holds the deadline
                    if self._closed or self._error is not None:
                        return
                    state.unanswered += 1
                self._channel.send(request)
                index += 1
            self._channel.send(End(stream, index))
        except ChannelClosed as error:
            self._fail(ProducerError(f"the sample queue of this run is gone: {error}"))
        except Exception as error:  # a prompt source may raise anything; whoever waits must learn of it
            self._fail(error)

    # -- every rank: what was made ---------------------------------------------------------------------------------

    def get(self, stream: Stream) -> FinishedSample | Dropped | Stored | None:
        """The next sample of the stream, in the order of indices; None behind the last.

        Raises:
            ProducerError: the producer died or made no progress for `step_timeout_s`.
            SampleError: more than `max_dropped_share` of the samples were dropped.
        """
        state = self._streams[stream]
        started_s = time.monotonic()
        with self._changed:
            while True:
                self._check_open()
                item = state.ready.pop(state.next_index, None) if state.next_index is not None else None
                if item is not None or (state.count is not None and state.next_index == state.count):
                    break
                self._check_deadline(stream, started_s)
                self._give_way(stream, started_s)
                self._changed.wait(_WAKE_S if self._starved is None else GIVE_WAY_AFTER_S)
            self._counted.wait_s += time.monotonic() - started_s
            if item is None:
                return None
            assert state.next_index is not None
            state.next_index += 1
            self._count(item)
        return item

    def discard(self, sample: FinishedSample, reason: DropReason, detail: str) -> None:
        """Give a sample back that cannot be trained on after all, and count it as dropped.

        Raises:
            SampleError: more than `max_dropped_share` of the samples were dropped.
        """
        sample.release()
        with self._changed:
            self._counted.taken -= 1
            self._counted.cut -= sample.was_cut
            self._count(Dropped(sample.stream, sample.index, sample.name, reason, detail))

    def forget(self, stream: Stream) -> None:
        """Let go all that still comes of a stream, and count from its end on: samples, waits, and the work of vLLM.

        Raises:
            ProducerError: the producer died or made no progress for `step_timeout_s`.
        """
        while (item := self.get(stream)) is not None:
            if isinstance(item, FinishedSample):
                item.release()
        started_s = time.monotonic()
        with self._changed:
            reported = self._producer
            while self._producer is reported:  # it comes once a second, the next time with all of this stream
                self._check_open()
                self._check_deadline(stream, started_s)
                self._changed.wait(_WAKE_S)
            self._counted = _Counters(before=self._producer)

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until the engine is up.

        Raises:
            ProducerError: it failed to start, or took longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while self._ready is None:
                if self._error is not None:
                    raise self._error
                if time.monotonic() > deadline_s:
                    raise ProducerError(f"vLLM was not ready after {timeout_s:.0f} s")
                self._changed.wait(_WAKE_S)
            return self._ready

    def stats(self) -> QueueStats:
        """The counters as of now."""
        with self._changed:
            waiting = [
                s for state in self._streams.values() for s in state.ready.values() if isinstance(s, FinishedSample)
            ]
            depth_tokens, counted = sum(s.num_rows for s in waiting), self._counted
            return QueueStats(
                depth_samples=len(waiting),
                depth_tokens=depth_tokens,
                depth_bytes=depth_tokens * self._arena.layout.row_bytes,
                wait_s=counted.wait_s,
                taken=counted.taken,
                cut=counted.cut,
                spilled=counted.spilled,
                dropped=dict(counted.dropped),
                dropped_names={reason: list(names) for reason, names in counted.names.items()},
                producer=since(counted.before, self._producer),
                restarts=self._producer.restarts,
            )

    def close(self) -> None:
        """Leave; samples that are still held become unreadable with the arena."""
        self._closed = True
        self._channel.close()
        with self._changed:
            self._changed.notify_all()
        if self._reader is not threading.current_thread():
            self._reader.join(timeout=5.0)

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ProducerError("the sample queue was closed while a sample was waited for")

    def _check_deadline(self, stream: Stream, started_s: float) -> None:
        if self._ready is None:
            return  # the supervisor holds the deadline of the engine's start, and fails the queue
        quiet_s = time.monotonic() - max(started_s, self._last_progress_s)
        if quiet_s > self._handle.step_timeout_s:
            wanted = f"{stream} sample {self._streams[stream].next_index}"
            raise ProducerError(f"waited {quiet_s:.0f} s for {wanted} and {self._whom(stream)}")

    def _whom(self, stream: Stream) -> str:
        """Who is waited for, in words."""
        state = self._streams[stream]
        if self._lacks_room(stream):  # what this rank held it has given back
            return (
                "the arena has no room for it: its blocks belong to samples that another rank has not trained on. See "
                "why that one does not go on"
            )
        if state.is_fed_here and state.count is None and state.unanswered == 0:
            return "the source of its prompts gave none"
        assert self._ready is not None
        return (
            f"vLLM (process {self._ready.pid}) made no progress: {self._producer.running} requests running, "
            f"{self._producer.free_blocks} arena blocks free"
        )

    def _give_way(self, stream: Stream, started_s: float) -> None:
        # What this rank holds may be all that is missing. With some patience: blocks just released are coming.
        if time.monotonic() - max(started_s, self._starved_since_s) < GIVE_WAY_AFTER_S or not self._lacks_room(stream):
            return
        for sample in list(self._out.values()):
            if sample.holds_blocks:
                sample.spill()
                self._counted.spilled += 1

    def _lacks_room(self, stream: Stream) -> bool:
        """Whether the sample that is waited for has no blocks yet, and none are free."""
        starved, next_index = self._starved, self._streams[stream].next_index
        if starved is None or next_index is None:
            return False
        return starved.stream != stream or starved.index <= next_index

    def _count(self, item: FinishedSample | Dropped | Stored) -> None:
        if isinstance(item, Stored):
            return
        counted = self._counted
        if isinstance(item, FinishedSample):
            counted.taken += 1
            counted.cut += item.was_cut
            return
        counted.dropped[item.reason] += 1
        names = counted.names.setdefault(item.reason, [])
        if len(names) < NAMES_PER_REASON:
            names.append(f"{item.stream} {item.index} ({item.name}): {item.detail}")
            log.warning(
                "dropped %s sample %d (%s) as %s: %s", item.stream, item.index, item.name, item.reason, item.detail
            )
        if item.stream == "self":
            return  # its reader throws most away by rules of its own, and has its own limit
        num_dropped = counted.dropped.total()
        share = num_dropped / (num_dropped + counted.taken)
        if num_dropped + counted.taken >= MIN_SAMPLES_FOR_SHARE and share > self._handle.max_dropped_share:
            first = {reason: names[0] for reason, names in counted.names.items()}
            reasons = "; ".join(f"{reason}: {n}, e.g. {first[reason]}" for reason, n in counted.dropped.items())
            raise SampleError(
                f"{num_dropped} of {num_dropped + counted.taken} samples were dropped, more than "
                f"data.queue.max_dropped_share = {self._handle.max_dropped_share}. {reasons}"
            )

    # -- the reader thread -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        while not self._closed:
            try:
                for message in self._channel.receive(_WAKE_S):
                    self._take(message)
            except (ChannelClosed, msgspec.DecodeError) as error:
                if not self._closed:
                    self._fail(ProducerError(f"rank 0 of the trainer, which owns the sample queue, is gone ({error})"))
                return
            except Exception as error:
                self._fail(error)
                return

    def _take(self, message: AnyMessage) -> None:
        match message:
            case Sample():
                item = self._checked(message)
                self._answered(item)
            case Dropped() | Stored():
                self._answered(message)
            case Begin(stream=stream, start_index=start_index):
                self._update(lambda: setattr(self._streams[stream], "next_index", start_index))
            case End(stream=stream, count=count):
                self._update(lambda: setattr(self._streams[stream], "count", count))
            case Ready():
                self._update(lambda: setattr(self, "_ready", message))
            case Starved():
                self._starved_since_s = time.monotonic()
                self._update(lambda: setattr(self, "_starved", message if message.waiting else None))
            case Stats():
                with self._changed:
                    if (message.prefill_tokens, message.decode_tokens) != (
                        self._producer.prefill_tokens,
                        self._producer.decode_tokens,
                    ):
                        self._last_progress_s = time.monotonic()
                    self._producer = message
                    self._changed.notify_all()
            case Failed(error=error, mistake=mistake):
                self._fail(ProducerError(error) if mistake is None else mistake.as_error())
            case _:
                raise TypeError(f"the hub sent {message}")

    def _update(self, change: Callable[[], None]) -> None:
        with self._changed:
            change()
            self._last_progress_s = time.monotonic()
            self._changed.notify_all()

    def _checked(self, message: Sample) -> FinishedSample | Dropped:
        sample = FinishedSample(message, self._arena, self._release)
        fault = find_fault(message, self._arena)
        if fault is None:
            self._out[message.serial] = sample
            return sample
        sample.release()
        return Dropped(message.stream, message.index, message.name, *fault)

    def _answered(self, item: FinishedSample | Dropped | Stored) -> None:
        def change() -> None:
            state = self._streams[item.stream]
            assert item.index not in state.ready, f"{item.stream} sample {item.index} came twice"
            state.ready[item.index] = item
            state.unanswered -= 1

        self._update(change)

    def _release(self, serial: int) -> None:
        self._out.pop(serial, None)
        with suppress(ChannelClosed):  # the run ends; nobody counts blocks any more
            self._channel.send(Release(serial))

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()
