"""Framed messages over a socket whose other side does not read for a while."""

import socket
from contextlib import closing

import pytest

from eagle3_lightning.stream import channel
from eagle3_lightning.stream.channel import Channel, ChannelClosed
from eagle3_lightning.stream.messages import Failed, Release


def read_on(there):
    """Until it is closed; nothing more comes."""
    while True:
        assert there.receive(1.0) == []


def test_nothing_is_said_behind_a_message_that_was_cut(monkeypatch):
    """Else the rest of the frame would be taken from the next messages, which are lost without a word."""
    monkeypatch.setattr(channel, "SEND_TIMEOUT_S", 0.2)
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as here, closing(Channel(theirs)) as there:
        here.send(Release(1))
        with pytest.raises(ChannelClosed, match="read nothing"):
            here.send(Failed("x" * (8 << 20)))  # more than a socket holds
        assert there.receive(1.0) == [Release(1)]
        with pytest.raises(ChannelClosed):
            here.send(Release(2))
        with pytest.raises(ChannelClosed):  # and the other side learns of it
            read_on(there)
