"""The middle of the queue: reserves arena blocks, passes requests to the producer and its answers to every rank.

A thread of the trainer's rank 0. It owns the credits: a request goes to vLLM only when blocks for its prompt and its
longest answer are free, in the order of submission, so that the sample which the trainer needs next always has its
blocks. What the producer still owes is kept here as well; a producer that is started again gets it once more.
"""

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from eagle3_lightning.stream.arena import BlockPool
from eagle3_lightning.stream.channel import Channel, ChannelClosed, flush_last_words
from eagle3_lightning.stream.counters import RunCounters
from eagle3_lightning.stream.door import Door
from eagle3_lightning.stream.messages import (
    AnyMessage,
    Begin,
    Dropped,
    End,
    Failed,
    Mistake,
    Ready,
    Release,
    Sample,
    Shutdown,
    Starved,
    Stats,
    Stored,
    Submit,
)

log = logging.getLogger(__name__)


@dataclass
class _Held:
    """Blocks of a delivered sample, and the ranks that may still read them."""

    blocks: list[int]
    ranks: set[int]


class Hub:
    """Runs in its own thread; everything but `post`, `close` and the attributes below happens there.

    Attributes:
        ready: the last Ready of a producer, once one has come.
        serving: a producer is connected and has said Ready.
        failure: why the hub gave up, or None.
        on_producer_lost: called in the hub's thread with the last words of a producer that is gone, empty if none came.
    """

    def __init__(
        self, num_blocks: int, block_tokens: int, world_size: int, listen: Path | None, max_running: int
    ) -> None:
        """Prepare the hub; `start` runs it.

        Args:
            num_blocks: blocks of the arena.
            block_tokens: rows of one block.
            world_size: ranks that read every sample.
            listen: path of the socket on which ranks other than this process's connect; None if there are none.
            max_running: requests that the producer runs at once; while it has as many, it does not starve.

        Raises:
            ConfigError: `listen` exists already.
        """
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.on_producer_lost: Callable[[str], None] = lambda words: self.fail(words or "the producer is gone")
        self._pool = BlockPool(num_blocks)
        self._block_tokens = block_tokens
        self._world_size, self._max_running = world_size, max_running
        self._backlog: deque[Submit] = deque()
        self._owed: dict[int, Submit] = {}
        self._held: dict[int, _Held] = {}
        self._ranks: dict[int, Channel] = {}
        self._producer: Channel | None = None
        self.serving = False  # the producer has said Ready
        self._history: list[AnyMessage] = []  # what a rank that connects late has missed
        self._serial = 0
        self._has_no_room = False  # for the request that is first in line
        self._counters = RunCounters()
        self._last_words: str | None = None
        self.mistake: Mistake | None = None  # the last words, where they are of one of the user's
        self._closing = False
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._run_posted)
        self._door = Door(listen, world_size, self._selector, self._add_rank, self._fail) if listen else None
        self._thread = threading.Thread(target=self._run, name="eagle3-hub", daemon=True)

    # -- called from other threads ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Run the hub's thread."""
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` in the hub's thread, soon."""
        self._posted.append(action)
        os.write(self._wake_write, b"x")

    def attach_rank(self, sock: socket.socket, rank: int) -> None:
        """Talk to a rank over `sock`."""
        self.post(lambda: self._add_rank(Channel(sock), rank, []))

    def attach_producer(self, sock: socket.socket, restarts: int) -> None:
        """Talk to a new producer over `sock`; it gets what the one before it still owed."""
        self.post(lambda: self._add_producer(Channel(sock), restarts))

    def fail(self, error: str, mistake: Mistake | None = None) -> None:
        """Tell every rank that no more samples will come, and why."""
        self.post(lambda: self._fail(error, mistake))

    def shutdown_producer(self) -> None:
        """Ask the producer to end; its going is expected from here on."""
        self.post(self._shutdown_producer)

    def close(self) -> None:
        """End the thread and close every connection."""
        if self._closing:
            return
        self._closing = True
        self.post(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()
        for channel in (*self._ranks.values(), *([self._producer] if self._producer else [])):
            channel.close()
        if self._door is not None:
            self._door.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, events in self._selector.select(None if self._door is None else self._door.due_s):
                    if events & selectors.EVENT_WRITE:
                        self._flush(key)
                    if events & selectors.EVENT_READ:
                        key.data()
                if self._door is not None:
                    self._door.check()
            while self._posted:  # before the close: why the run ends may be among it
                self._posted.popleft()()
        except Exception as error:  # a fault of ours must end the run, not hang it
            log.exception("the hub of the sample queue failed")
            self._fail(f"the hub of the sample queue failed: {error!r}")
        if self.failure is not None:  # ranks that are behind with their reading must learn of it, too
            flush_last_words(self._ranks.values())

    def _run_posted(self) -> None:
        os.read(self._wake_read, 4096)
        while self._posted:
            self._posted.popleft()()

    def _add_rank(self, channel: Channel, rank: int, said: list[AnyMessage]) -> None:
        self._ranks[rank] = channel
        with suppress(ChannelClosed):  # a rank that left before it was let in; its end is read below
            for message in self._history:
                channel.post(message)
        self._register(channel, rank)
        for message in said:
            self._from_rank(message, rank)

    def _add_producer(self, channel: Channel, restarts: int) -> None:
        # Not serving, even where the end of the one before has not been read yet: what is sent to a producer before its
        # Ready would be sent once more, under another serial, behind it.
        self._producer, self.serving, self._last_words, self.mistake = channel, False, None, None
        self._counters.begin_producer(restarts)
        self._count_starvation()
        self._register(channel, None)

    def _register(self, channel: Channel, rank: int | None) -> None:
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._read(channel, rank))
        self._await_room(channel)

    # The hub never waits for room in a socket: a side that does not read may be waiting for the hub to read, and all
    # others would wait with the two. What has no room yet is kept; credits bound how much that can be.

    def _send(self, channel: Channel, message: AnyMessage) -> None:
        channel.post(message)
        self._await_room(channel)

    def _flush(self, key: selectors.SelectorKey) -> None:
        assert isinstance(key.fileobj, Channel)
        with suppress(ChannelClosed):  # its end is read as well, and handled there
            key.fileobj.flush()
            self._await_room(key.fileobj)

    def _await_room(self, channel: Channel) -> None:
        key = self._selector.get_key(channel)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if channel.num_unsent_bytes else 0)
        if events != key.events:
            self._selector.modify(channel, events, key.data)

    def _read(self, channel: Channel, rank: int | None) -> None:
        try:
            messages = channel.receive(0.0)
        except (ChannelClosed, msgspec.DecodeError) as error:
            self._selector.unregister(channel)
            channel.close()
            self._lost(channel, rank, str(error))
            return
        for message in messages:
            if rank is not None:
                self._from_rank(message, rank)
            elif channel is self._producer:  # else words of a dead one, read only when the next had come
                self._from_producer(message)

    def _lost(self, channel: Channel, rank: int | None, reason: str) -> None:
        if rank is None:
            if channel is not self._producer:
                return
            self._producer, self.serving = None, False
            self._count_starvation()
            if self.failure is None and not self._closing:
                self.on_producer_lost(self._last_words or "")
        else:
            del self._ranks[rank]
            if self._ranks and not self._closing:
                self._fail(f"rank {rank} of the trainer is gone ({reason})")

    def _from_rank(self, message: AnyMessage, rank: int) -> None:
        match message:
            case Submit():
                self._backlog.append(message)
                self._admit()
            case Release(serial=serial):
                held = self._held[serial]
                held.ranks.remove(rank)
                if not held.ranks:
                    del self._held[serial]
                    self._pool.give(held.blocks)
                    self._admit()
            case Begin() | End() | Dropped() | Stored():
                self._broadcast(message)
            case _:
                raise TypeError(f"rank {rank} sent {message}")

    def _from_producer(self, message: AnyMessage) -> None:
        match message:
            case Sample():
                self._deliver(message)
            case Dropped(serial=serial):
                self._pool.give(self._owed.pop(serial).blocks)
                self._broadcast(message)
                self._admit()
            case Ready():
                self.ready, self.serving = message, True
                self._broadcast(message)
                for submit in list(self._owed.values()):  # a restart: nothing is owed to the first producer yet
                    self._resubmit(submit)
                self._admit()
            case Stats():
                self._broadcast(self._counters.add(message, self._pool.num_free))
            case Failed(error=error, mistake=mistake):
                self._last_words, self.mistake = error, mistake
            case _:
                raise TypeError(f"the producer sent {message}")

    def _admit(self) -> None:
        """Reserve blocks for the requests in line, in order, as far as they go."""
        while self._backlog and self.serving:
            head = self._backlog[0]
            num_blocks = -(-(len(head.prompt_ids) + head.max_new_tokens) // self._block_tokens)
            if num_blocks > self._pool.num_blocks:
                self._backlog.popleft()
                detail = f"{len(head.prompt_ids)} + {head.max_new_tokens} tokens do not fit the arena"
                self._broadcast(Dropped(head.stream, head.index, head.name, "too_long", detail))
                continue
            blocks = self._pool.take(num_blocks)
            if self._has_no_room != (blocks is None):
                self._has_no_room = blocks is None
                self._broadcast(Starved(head.stream, head.index, waiting=self._has_no_room))
            if blocks is None:
                break
            self._backlog.popleft()
            self._submit(msgspec.structs.replace(head, blocks=blocks))
        self._count_starvation()

    def _count_starvation(self) -> None:
        could_run_more = self.serving and len(self._owed) < self._max_running
        self._counters.set_starved(bool(self._backlog) and self._has_no_room and could_run_more)

    def _submit(self, submit: Submit) -> None:
        self._serial += 1
        submit = msgspec.structs.replace(submit, serial=self._serial)
        self._owed[self._serial] = submit
        self._to_producer(submit)

    def _resubmit(self, submit: Submit) -> None:
        # Under a new serial: rows that the dead producer left behind must not pass for the new one's.
        del self._owed[submit.serial]
        self._submit(submit)

    def _deliver(self, sample: Sample) -> None:
        reserved = self._owed.pop(sample.serial).blocks
        num_kept = -(-sample.num_rows // self._block_tokens)
        kept, surplus = reserved[:num_kept], reserved[num_kept:]
        self._pool.give(surplus)
        self._held[sample.serial] = _Held(kept, {0} if sample.stream == "self" else set(range(self._world_size)))
        self._broadcast(msgspec.structs.replace(sample, blocks=kept))
        self._admit()

    def _to_producer(self, message: AnyMessage) -> None:
        if self._producer is None:
            return  # between two producers: what is owed goes to the next one
        with suppress(ChannelClosed):  # its end is read as well, and handled there
            self._send(self._producer, message)

    def _broadcast(self, message: AnyMessage) -> None:
        private = getattr(message, "stream", None) == "self"  # rank 0's alone
        if len(self._ranks) == self._world_size:
            self._history.clear()
        elif not private and not isinstance(message, Stats):  # the next ones will tell more
            self._history.append(message)
        for rank, channel in list(self._ranks.items()):
            if private and rank != 0:
                continue
            try:
                self._send(channel, message)
            except ChannelClosed as error:
                log.warning("rank %d of the trainer does not listen: %s", rank, error)

    def _fail(self, error: str, mistake: Mistake | None = None) -> None:
        if self.failure is None:
            self.failure = error
            self._broadcast(Failed(error, mistake))

    def _shutdown_producer(self) -> None:
        self.on_producer_lost = lambda reason: None
        self._to_producer(Shutdown())
