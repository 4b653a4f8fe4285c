"""The real Extractor on a producer process with a toy engine: its end, asked for by two threads at once."""

import os
import signal
import tempfile
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from queue_bench import request
from toy_target import make_target

from eagle3_lightning.data_feed import QueueFeed
from eagle3_lightning.errors import ConfigError, ProducerError
from eagle3_lightning.extract import supervisor
from eagle3_lightning.extract.supervisor import Extractor
from eagle3_lightning.extract.watchdog import group_members
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import EngineOptions, QueueOptions, SamplingOptions, TargetOptions
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.hub import Hub
from eagle3_lightning.target import inspect_target


class ToyProducerExtractor(Extractor):
    producer_module = "toy_producer"


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function that starts an Extractor and waits until its producer serves; everything is closed at the end."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    info = inspect_target(TargetOptions(str(make_target(tmp_path / "target"))))
    made = []
    sockets = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own is too long for sockets

    def start(max_restarts=0, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        extractor = ToyProducerExtractor(
            info, LayerPlan((0, 1, 2), info.num_layers - 1), EngineOptions(max_model_len=128, max_num_seqs=8),
            QueueOptions(capacity_tokens=1024, socket_dir=sockets), SamplingOptions(), tmp_path,
            max_restarts=max_restarts,
        )  # fmt: skip
        made.append(extractor)
        extractor.start()
        extractor.wait_ready()
        return extractor

    yield start
    for extractor in made:
        extractor.close()
    sockets.rmdir()  # nothing is left in it


@pytest.fixture
def order(monkeypatch):
    """What was closed, in order; the hub takes its time, so that a second closer would overtake the first."""
    seen: list[str] = []
    close_hub, close_arena = Hub.close, Arena.close

    def slow(hub):
        time.sleep(0.5)
        close_hub(hub)
        seen.append("hub")

    def note(arena):
        close_arena(arena)
        seen.append("arena")

    monkeypatch.setattr(Hub, "close", slow)
    monkeypatch.setattr(Arena, "close", note)
    return seen


def in_thread(action):
    """Run it in a thread; the returned function waits for its end and raises what it raised."""
    raised: list[BaseException] = []

    def run():
        try:
            action()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(60)
        assert not thread.is_alive()
        if raised:
            raise raised[0]

    return join


def wait_until(condition, what):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.01)


class OnDisk:
    """Every sample of an endless stream, for a feed that goes on without vLLM."""

    def begin(self, stream, start, stop):
        self.start = start

    def get(self, stream):
        return f"{stream} {self.start} from the disk"


def test_the_run_ends_while_the_batch_thread_ends_vllm(make, order):
    """All is on disk, the batch thread ends vLLM, and the main thread closes at that moment."""
    extractor = make(TOY_ENDS_AFTER_S="0.5")
    queue = extractor.queue()
    feed = QueueFeed(queue, extractor, {}, store=object(), disk=OnDisk(), alone=True)
    feed._next["train"] = 0
    queue.feed("train", iter(()))  # what the feeder of rank 0 does once all rows are stored
    got = []
    join = in_thread(lambda: got.append(feed.get("train")))
    wait_until(lambda: extractor._closing, "the batch thread does not end vLLM")
    group, arena = extractor.pid, Path(extractor.handle.arena_path)
    feed.close()
    extractor.close()
    assert order == ["hub", "arena"]
    assert group_members(group) == []
    assert not arena.exists()
    join()
    assert got == ["train 0 from the disk"]
    assert order == ["hub", "arena"]


def test_an_end_of_vllm_alone_behind_the_end_of_all_does_nothing(make, order):
    """Two ranks: the batch thread wants vLLM to end, and the main thread has closed everything meanwhile."""
    extractor = make()
    join = in_thread(extractor.close)
    wait_until(lambda: extractor._closing, "the first closer does not begin")
    extractor.end_producer()
    assert order == ["hub", "arena"]
    extractor.end_producer()
    join()
    assert order == ["hub", "arena"]


def test_a_group_that_is_gone_is_left_alone(make, monkeypatch):
    """The run goes on from the disk; at its end, the number of vLLM's group may be that of somebody else."""
    extractor = make()
    extractor.end_producer()
    assert group_members(extractor.pid) == []
    signalled = []
    monkeypatch.setattr(supervisor, "kill_group", lambda group, sign: signalled.append(group))
    extractor.close()
    assert signalled == []


def num_started(caplog):
    return sum(message.startswith("vLLM starts as process") for message in caplog.messages)


def test_no_producer_is_started_again_for_a_run_that_ends(make, monkeypatch, caplog):
    """The producer hangs behind its last word; the run ends while the supervisor sweeps it up."""
    caplog.set_level("INFO")
    monkeypatch.setattr(supervisor, "TERM_TIMEOUT_S", 1.0)
    extractor = make(max_restarts=5, TOY_ENDS_AFTER_S="30")
    swept = threading.Event()
    end_group = Extractor._end_group

    def note(self):
        swept.set()
        end_group(self)

    monkeypatch.setattr(Extractor, "_end_group", note)
    extractor._hub.shutdown_producer()  # it ends its connection, and then sleeps
    extractor._hub.post(lambda: setattr(extractor._hub, "on_producer_lost", extractor._note_lost))
    assert swept.wait(30)
    extractor.close()
    assert num_started(caplog) == 1


def test_a_dead_producer_is_started_again_as_often_as_it_may_be(make, caplog):
    caplog.set_level("INFO")
    extractor = make(max_restarts=1)
    first = extractor.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: extractor.pid != first, "no other producer")
    queue = extractor.queue()
    queue.feed("train", map(request, count()))
    assert queue.get("train").index == 0
    os.kill(extractor.pid, signal.SIGKILL)
    with pytest.raises(ProducerError, match="after 1 restarts"):
        list(iter(lambda: queue.get("train").release(), "never"))
    assert num_started(caplog) == 2


def test_a_mistake_that_the_producer_finds_is_told_as_one(make, tmp_path):
    """Without its log, and without another start, which would end the same way."""
    with pytest.raises(ConfigError) as caught:
        make(max_restarts=2, TOY_MISTAKE="1.5")
    assert str(caught.value) == "data.engine.extra.foo = 1.5: there is no such thing. Leave it out."
    assert caught.value.value == 1.5
    assert (tmp_path / "vllm.log").read_text().count("ConfigError:") == 1
