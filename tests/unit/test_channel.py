"""Framed messages over a socket whose other side does not read for a while."""

import socket
import threading
import time
from contextlib import closing

import pytest
from queue_toy import ToyEngine, serve_toy

from eagle3_lightning.stream import channel
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.channel import Channel, ChannelClosed
from eagle3_lightning.stream.messages import Failed, Release, Submit


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


def test_a_producer_whose_trainer_was_stopped_says_so_in_its_log(monkeypatch, capfd):
    """Stopped for longer than the deadline, as with Ctrl-Z."""
    monkeypatch.setattr(channel, "SEND_TIMEOUT_S", 0.3)
    ours, theirs = socket.socketpair()
    arena = Arena.create(4096, 4, 2, 4, "float32")
    with closing(Channel(ours)) as hub:
        for index in range(600):  # more answers than a socket holds
            hub.post(Submit("train", index, "x" * 1000, [1, 2], [], 1, serial=index + 1, blocks=[index]))
        producer = threading.Thread(target=serve_toy, args=(Channel(theirs), ToyEngine(), arena.path, arena.layout))
        producer.start()
        while hub.num_unsent_bytes:
            hub.flush()
            time.sleep(0.001)
        producer.join(20.0)
        assert not producer.is_alive()
    assert "the trainer does not listen: the other side read nothing" in capfd.readouterr().out
    arena.close()
