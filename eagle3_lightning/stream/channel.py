"""Framed messages over one Unix socket. Only msgpack bodies of messages.py; nothing that could carry a tensor."""

import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from eagle3_lightning.stream.messages import AnyMessage

_LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 64 << 20
SEND_TIMEOUT_S = 60.0
LAST_WORDS_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 20


class ChannelClosed(Exception):
    """The other side has closed the connection, or its process is gone."""


class Channel:
    """One connection. `send` may be called from several threads, `receive` from one.

    Whoever must never wait for the other side, as the hub in the middle, has `post` and `flush` in the place of `send`;
    these are for one thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected stream socket.

        Args:
            sock: closed by `close`.
        """
        sock.settimeout(SEND_TIMEOUT_S)
        self._sock = sock
        self._send_lock = threading.Lock()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
        self._pending = bytearray()
        self._unsent = bytearray()  # of what was posted
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._sock.fileno()

    def send(self, message: AnyMessage) -> None:
        """Write one message, waiting at most SEND_TIMEOUT_S for the other side to read.

        Raises:
            ChannelClosed: the other side is gone, or did not read in time.
        """
        frame = self._frame(message)
        try:
            with self._send_lock:
                self._sock.sendall(frame)
        except TimeoutError as error:
            with suppress(OSError):  # a part of the frame may be there: whatever came behind it would be misread
                self._sock.shutdown(socket.SHUT_RDWR)
            raise ChannelClosed(f"the other side read nothing for {SEND_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def post(self, message: AnyMessage) -> None:
        """Write one message as far as the other side has room for it; `flush` writes the rest.

        Raises:
            ChannelClosed: the other side is gone.
        """
        self._unsent += self._frame(message)
        self.flush()

    def flush(self) -> None:
        """Write what was posted, as far as the other side has room for it.

        Raises:
            ChannelClosed: the other side is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: os.write(self._sock.fileno(), self._unsent)]  # a socket's `send` would wait
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    @property
    def num_unsent_bytes(self) -> int:
        """What `flush` has still to write."""
        return len(self._unsent)

    def _frame(self, message: AnyMessage) -> bytes:
        body = self._encoder.encode(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a {type(message).__name__} of {len(body)} bytes is over the frame limit of {MAX_FRAME_BYTES}"
            )
        return _LENGTH.pack(len(body)) + body

    def receive(self, timeout_s: float) -> list[AnyMessage]:
        """Every message that is there, or that comes within `timeout_s`; an empty list if none did.

        Raises:
            ChannelClosed: the other side closed; messages that it sent before have all been returned by then.
        """
        try:
            if not self._poll.poll(timeout_s * 1000):
                return []
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("closed by the other side")
        self._pending += data
        return self._take_frames()

    def _take_frames(self) -> list[AnyMessage]:
        messages: list[AnyMessage] = []
        start = 0
        while len(self._pending) - start >= _LENGTH.size:
            (num_bytes,) = _LENGTH.unpack_from(self._pending, start)
            if num_bytes > MAX_FRAME_BYTES:
                raise ChannelClosed(f"a frame of {num_bytes} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + num_bytes
            if len(self._pending) < end:
                break
            messages.append(self._decoder.decode(self._pending[start + _LENGTH.size : end]))
            start = end
        del self._pending[:start]
        return messages

    def close(self) -> None:
        """Close the socket; a `receive` of the other side ends with ChannelClosed."""
        with suppress(OSError):  # gone already
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def flush_last_words(channels: Iterable[Channel]) -> None:
    """Write what was posted, as far as the other sides read it within LAST_WORDS_TIMEOUT_S; what they say is let go."""
    deadline_s = time.monotonic() + LAST_WORDS_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            if channel.num_unsent_bytes:
                selector.register(channel, selectors.EVENT_READ | selectors.EVENT_WRITE, channel)
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, events in selector.select(left_s):
                with suppress(ChannelClosed, msgspec.DecodeError):
                    if events & selectors.EVENT_READ:
                        key.data.receive(0.0)  # who waits for room does not read
                    key.data.flush()
                    if key.data.num_unsent_bytes:
                        continue
                selector.unregister(key.fileobj)
