"""The hub's socket, where ranks of other processes connect: each says its Hello before it is let in."""

import selectors
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.stream.channel import Channel, ChannelClosed
from eagle3_lightning.stream.messages import AnyMessage, Hello

# A rank says it at once; what passes is a machine that is too busy, or a rank that was stopped just then.
HELLO_TIMEOUT_S = 60.0


class Door:
    """Lets ranks in from the hub's own thread; nobody waits for one that is slow to say who it is."""

    def __init__(
        self,
        path: Path,
        world_size: int,
        selector: selectors.BaseSelector,
        let_in: Callable[[Channel, int, list[AnyMessage]], None],
        refuse: Callable[[str], None],
    ) -> None:
        """Listen.

        Args:
            path: of the socket.
            world_size: of the run; ranks 1 and above come here.
            selector: the hub's, which calls what is registered with it.
            let_in: takes a rank's connection, its number and what it said behind its Hello.
            refuse: learns of a stranger, who may have been a rank without which the run cannot go on.

        Raises:
            ConfigError: `path` exists already, or no socket can be made there.
        """
        self._world_size, self._selector = world_size, selector
        self._let_in, self._refuse = let_in, refuse
        self._awaited = set(range(1, world_size))
        self._unnamed: dict[Channel, float] = {}  # connections whose Hello is due, and until when
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            raise ConfigError(
                "data.queue.socket_dir",
                str(path.parent),
                f"no socket can be made there ({error})",
                "Name a directory with a short path that you can write to.",
            ) from error
        self._listener.listen(world_size)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def due_s(self) -> float | None:
        """Seconds until `check` has something to do; None if nobody's Hello is due."""
        return max(0.0, min(self._unnamed.values()) - time.monotonic()) if self._unnamed else None

    def check(self) -> None:
        """Turn away who has said nothing for too long."""
        for channel, due_s in list(self._unnamed.items()):
            if time.monotonic() >= due_s:
                self._turn_away(channel, f"it said nothing for {HELLO_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        """Close the socket, and the connections that were not let in."""
        for channel in self._unnamed:
            channel.close()
        self._listener.close()

    def _accept(self) -> None:
        channel = Channel(self._listener.accept()[0])
        self._unnamed[channel] = time.monotonic() + HELLO_TIMEOUT_S
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._greet(channel))

    def _greet(self, channel: Channel) -> None:
        try:
            messages = channel.receive(0.0)
        except (ChannelClosed, msgspec.DecodeError) as error:
            self._turn_away(channel, str(error))
            return
        if not messages:
            return  # a part of one
        hello, *others = messages
        if not isinstance(hello, Hello) or hello.rank not in self._awaited:
            self._turn_away(channel, str(hello))
            return
        self._awaited.remove(hello.rank)
        del self._unnamed[channel]
        self._selector.unregister(channel)
        self._let_in(channel, hello.rank, others)

    def _turn_away(self, channel: Channel, words: str) -> None:
        del self._unnamed[channel]
        self._selector.unregister(channel)
        channel.close()
        self._refuse(f"a stranger came to the hub's socket, where ranks 1 to {self._world_size - 1} connect: {words}")
