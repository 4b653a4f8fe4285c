"""The real hub, queue and arena with toy producers, as the tests of the queue set them up."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from queue_toy import ToyEngine, serve_toy

from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.channel import Channel
from eagle3_lightning.stream.hub import Hub
from eagle3_lightning.stream.messages import Submit
from eagle3_lightning.stream.queue import QueueHandle, SampleQueue

BLOCK_TOKENS = 4


class Bench:
    """A hub with its arena, the queues of some ranks and toy producers."""

    def __init__(
        self, num_blocks=64, world_size=1, window=32, step_timeout_s=20.0, max_dropped_share=0.05, tmp_path=None, late=0
    ):
        self.arena = Arena.create(num_blocks * BLOCK_TOKENS, BLOCK_TOKENS, 2, 4, "float32")
        listen = tmp_path / "hub" if world_size > 1 else None
        self.hub = Hub(num_blocks, BLOCK_TOKENS, world_size, listen, max_running=256)
        self.hub.start()
        self.handle = QueueHandle(
            self.arena.path,
            self.arena.layout,
            str(listen) if listen else None,
            window,
            step_timeout_s,
            max_dropped_share,
        )
        ours, theirs = socket.socketpair()
        self.hub.attach_rank(theirs, 0)
        self.queues = [SampleQueue(ours, self.arena, self.handle)]
        self.queues += [SampleQueue.connect(self.handle, rank, 0) for rank in range(1, world_size - late)]
        self.engines = []

    def start_producer(self, engine=None, restarts=0):
        engine = engine or ToyEngine(len(self.engines))
        ours, theirs = socket.socketpair()
        self.hub.attach_producer(ours, restarts)
        args = (Channel(theirs), engine, self.arena.path, self.arena.layout)
        self.producer = threading.Thread(target=serve_toy, args=args, daemon=True)
        self.producer.start()
        self.engines.append(engine)
        self.producer_socket = theirs
        return engine

    def kill_producer(self):
        """As the supervisor does it: nothing of the old one runs any more when a new one starts."""
        self.producer_socket.shutdown(socket.SHUT_RDWR)
        self.producer.join(10)

    def close(self):
        for queue in self.queues:
            queue.close()
        self.hub.close()
        self.arena.close()


@contextmanager
def bench(**options):
    made = Bench(**options)
    try:
        yield made
    finally:
        made.close()


def request(index, prompt_tokens=None, max_new_tokens=6, name=None, stream="train"):
    prompt_tokens = prompt_tokens or 2 + index * 7 % 11
    return Submit(
        stream, index, name or f"s{index}", list(range(10 * index, 10 * index + prompt_tokens)), [], max_new_tokens
    )


def check_rows(sample):
    wanted = torch.tensor(sample.token_ids[: sample.num_rows], dtype=torch.float32)
    assert torch.equal(sample.rows(), wanted[:, None, None].expand(-1, 2, 4))


def resident_bytes(pid):
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * 4096  # the arena is shared


def soak(num_samples, settled, growth):
    """Many samples from a producer process to a trainer that is fast and slow by turns.

    None is lost, none comes twice, order is kept, rows are intact, and no process grows by more than `growth` after the
    first `settled`.
    """
    with bench(num_blocks=64) as b:
        ours, theirs = socket.socketpair()
        program = [sys.executable, str(Path(__file__).with_name("queue_toy.py")), str(theirs.fileno()), b.arena.path]
        layout = msgspec.json.encode(b.arena.layout).decode()
        with subprocess.Popen([*program, layout], pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            b.hub.attach_producer(ours, 0)
            b.queues[0].feed("train", (request(i, 2 + i * 13 % 31, 1 + i % 9) for i in range(num_samples)))
            pace = random.Random(1)
            for index in range(num_samples):
                sample = b.queues[0].get("train")
                assert sample.index == index
                if index % 7 == 0:
                    check_rows(sample)
                sample.release()
                if pace.random() < 0.02:
                    time.sleep(0.01)
                if index == settled:
                    before = [resident_bytes(pid) for pid in (process.pid, os.getpid())]
            assert b.queues[0].get("train") is None
            after = [resident_bytes(pid) for pid in (process.pid, os.getpid())]
            assert all(now < growth * then for now, then in zip(after, before, strict=True)), (before, after)
            b.hub.shutdown_producer()
            assert process.wait(10) == 0
    return before, after
