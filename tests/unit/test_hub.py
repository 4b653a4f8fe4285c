"""Who comes to the hub's socket: ranks, slow ranks and strangers. Hub, queue and arena are real, engines are toys."""

import socket
import struct
import threading
import time
from contextlib import closing, contextmanager

import msgspec
import pytest
from queue_bench import BLOCK_TOKENS, bench, check_rows, request

from eagle3_lightning.errors import ProducerError
from eagle3_lightning.stream import channel, door, hub
from eagle3_lightning.stream.channel import Channel
from eagle3_lightning.stream.messages import Dropped, Failed, Hello, Ready, Release, Sample, Stats
from eagle3_lightning.stream.queue import SampleQueue


def take(queue, count):
    seen = []
    for _ in range(count):
        sample = queue.get("train")
        check_rows(sample)
        sample.release()
        seen.append(sample.index)
    return seen


def connect(b):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(b.handle.socket_path)
    return sock


def frame(message):
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


def test_a_rank_that_is_slow_to_say_who_it_is_keeps_nobody_waiting(tmp_path):
    with bench(world_size=3, late=2, tmp_path=tmp_path) as b:
        b.start_producer()
        slow = connect(b)
        b.queues.append(SampleQueue.connect(b.handle, 1, 0))
        b.queues[0].feed("train", (request(i) for i in range(10)))
        assert take(b.queues[0], 5) == take(b.queues[1], 5) == list(range(5))
        words = frame(Hello(2, 0))
        slow.sendall(words[:3])
        assert take(b.queues[0], 2) == take(b.queues[1], 2) == [5, 6]
        slow.sendall(words[3:])
        b.queues.append(SampleQueue(slow, b.arena, b.handle))
        assert take(b.queues[2], 10) == list(range(10))
        assert take(b.queues[0], 3) == take(b.queues[1], 3) == [7, 8, 9]


def test_words_that_come_together_with_the_hello_are_not_lost(tmp_path):
    """A rank that was stopped behind its first words may be read late, all at once."""
    with bench(num_blocks=4, world_size=2, late=1, tmp_path=tmp_path) as b:
        b.start_producer()
        b.queues[0].feed("train", (request(i, 6, 2) for i in range(3)))  # two blocks each: the third waits for both
        take(b.queues[0], 2)
        with closing(Channel(sock := connect(b))) as rank:
            sock.sendall(frame(Hello(1, 0)) + frame(Release(1)) + frame(Release(2)))
            assert take(b.queues[0], 1) == [2]
            assert any(isinstance(message, Ready) for message in rank.receive(10.0))


@contextmanager
def rank_1_reads_nothing(tmp_path):
    """Rank 0 has had 1,000 samples, of which the sockets to rank 1 hold 200; a bench and rank 1's side of it."""
    with bench(num_blocks=2000, window=2000, world_size=2, late=1, tmp_path=tmp_path) as b:
        b.start_producer()
        with closing(Channel(sock := connect(b))) as silent:
            sock.sendall(frame(Hello(1, 0)))
            b.queues[0].feed("train", (request(i, 2, 2, name="x" * 1000) for i in range(1000)))
            assert take(b.queues[0], 1000) == list(range(1000))
            yield b, silent


def listen(rank, ended):
    """What a rank hears until `ended` says of it that it is enough."""
    heard = []
    while not ended(heard):
        new = rank.receive(10.0)
        assert new
        heard += new
    return heard


def serials(heard):
    return [message.serial for message in heard if isinstance(message, Sample)]


def test_a_rank_that_reads_nothing_keeps_nobody_waiting(tmp_path):
    """It gets all of it when it reads again."""
    with rank_1_reads_nothing(tmp_path) as (_, silent):
        heard = serials(listen(silent, lambda heard: len(serials(heard)) >= 1000))
        assert len(set(heard)) == len(heard) == 1000


@pytest.mark.parametrize("end", [lambda made: made.post(lambda: 1 / 0), lambda made: made.fail("ZeroDivisionError")])
def test_a_rank_that_is_behind_learns_why_the_run_ends(tmp_path, end):
    """Of a fault of the hub itself, after which it runs no more, and of one after which it is closed at once."""
    with rank_1_reads_nothing(tmp_path) as (b, behind):
        end(b.hub)
        closes = threading.Thread(target=b.hub.close)
        closes.start()
        heard = listen(behind, lambda heard: heard and isinstance(heard[-1], Failed))
        assert "ZeroDivisionError" in heard[-1].error
        assert len(serials(heard)) == 1000
        closes.join(10.0)
        assert not closes.is_alive()


def test_a_rank_that_never_reads_its_last_words_does_not_keep_the_hub_from_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "LAST_WORDS_TIMEOUT_S", 0.3)
    with rank_1_reads_nothing(tmp_path) as (b, _):
        b.hub.fail("the reason")
        b.hub.close()
        assert not b.hub._thread.is_alive()


def test_silence_has_a_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(door, "HELLO_TIMEOUT_S", 0.3)
    with bench(world_size=2, late=1, tmp_path=tmp_path) as b, closing(connect(b)) as silent:
        with pytest.raises(ProducerError, match=r"a stranger came .* ranks 1 to 1 connect: it said nothing for"):
            b.queues[0].get("train")
        assert silent.recv(1) == b""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (frame(Hello(1, 0)), r"Hello\(rank=1"),
        (frame(Hello(0, 0)), r"Hello\(rank=0"),
        (frame(Hello(3, 0)), r"Hello\(rank=3"),
        (frame(Hello(-1, 0)), r"Hello\(rank=-1"),
        (frame(Release(0)), r"Release\(serial=0\)"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of .* bytes is over the limit"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "MessagePack"),
        (None, "closed by the other side"),
    ],
    ids=["taken", "rank 0", "rank too high", "rank below 0", "not a Hello", "not ours", "not msgpack", "no word"],
)
def test_a_stranger_ends_the_run_with_its_words(tmp_path, words, reason):
    with bench(world_size=3, late=1, tmp_path=tmp_path) as b, closing(connect(b)) as stranger:
        b.start_producer()
        b.queues[1].wait_ready(20.0)  # rank 1 is in
        stranger.shutdown(socket.SHUT_WR) if words is None else stranger.sendall(words)
        for queue in b.queues:
            with pytest.raises(ProducerError, match=rf"a stranger came .* ranks 1 to 2 connect: .*{reason}"):
                queue.get("train")
        assert stranger.recv(1) == b""


def test_what_rank_0_reads_alone_waits_for_no_other_rank_and_none_hears_of_it(tmp_path):
    with bench(num_blocks=4, world_size=3, late=1, tmp_path=tmp_path) as b:
        b.start_producer()
        b.queues[0].feed("self", (request(i, 6, 2, stream="self") for i in range(20)))  # two blocks each
        for index in range(20):
            sample = b.queues[0].get("self")
            check_rows(sample)
            assert sample.index == index
            sample.release()
        b.queues[0].forget("self")
        b.queues[0].feed("train", (request(i, 6, 2) for i in range(2)))
        with closing(Channel(sock := connect(b))) as late:
            sock.sendall(frame(Hello(2, 0)))
            heard = listen(late, lambda heard: len(serials(heard)) >= 2)
            assert sum(isinstance(message, Ready) for message in heard) == 1
            assert {getattr(message, "stream", "train") for message in heard} == {"train"}
            assert take(b.queues[0], 2) == take(b.queues[1], 2) == [0, 1]
            assert b.queues[1].stats().depth_samples == 0


@pytest.mark.parametrize(("max_running", "starves"), [(2, False), (3, True)])
def test_a_producer_that_is_full_does_not_starve(max_running, starves):
    """Four blocks, two for each request: the third one waits for room."""
    made = hub.Hub(4, BLOCK_TOKENS, 1, None, max_running)
    made.serving = True
    for i in range(3):
        made._from_rank(request(i, BLOCK_TOKENS, BLOCK_TOKENS), 0)
    time.sleep(0.02)
    assert (made._counters.add(Stats(), 0).starved_s > 0) is starves
    time.sleep(0.02)
    for submit in list(made._owed.values()):  # dropped: room for the third one, and nobody waits
        made._from_producer(Dropped("train", submit.index, submit.name, "aborted", "", submit.serial))
    before = made._counters.add(Stats(), 0).starved_s
    time.sleep(0.02)
    assert made._counters.add(Stats(), 0).starved_s == before
    assert (before > 0.04) is starves
    made.close()


def test_a_producer_that_is_gone_does_not_starve():
    """Until the next one serves, nothing could run, room or not."""
    ours, theirs = socket.socketpair()
    made = hub.Hub(4, BLOCK_TOKENS, 1, None, 3)
    made.on_producer_lost = lambda words: None
    made._add_producer(channel := Channel(ours), 0)
    made.serving = True
    for i in range(3):
        made._from_rank(request(i, BLOCK_TOKENS, BLOCK_TOKENS), 0)
    time.sleep(0.02)
    made._lost(channel, None, "killed")
    before = made._counters.add(Stats(), 0).starved_s
    assert before > 0
    time.sleep(0.02)
    assert made._counters.add(Stats(), 0).starved_s == before
    made._from_producer(Ready("0.0", "toy", 2, 4, "float32", 1, []))
    time.sleep(0.02)
    assert made._counters.add(Stats(), 0).starved_s > before
    made.close()
    channel.close()
    theirs.close()
