"""The real queue with a toy at its other end: a thread that answers requests as vLLM's producer would, out of order.

States are a function of the token ids alone, and so are answers. What is under test stands on this side of the queue.
"""

import random
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3_lightning.datamodule import HiddenStateDataModule
from eagle3_lightning.extract.rows import RowWriter
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.channel import Channel, ChannelClosed
from eagle3_lightning.stream.hub import Hub
from eagle3_lightning.stream.messages import Ready, Sample, Shutdown, Stats, Submit
from eagle3_lightning.stream.queue import QueueHandle, SampleQueue

NUM_LAYERS, HIDDEN = 4, 8


def states(ids: list[int]) -> Tensor:
    """[S, L, H] float32, other values for every (token, position, layer, channel); the last layer is normed."""
    token, position = torch.tensor(ids)[:, None, None], torch.arange(len(ids))[:, None, None]
    layer, channel = torch.arange(NUM_LAYERS)[:, None], torch.arange(HIDDEN)
    rows = torch.sin(token * 0.37 + position * 0.11 + layer * 1.7 + channel * 0.53).float()
    rows[:, -1] *= torch.rsqrt(rows[:, -1].pow(2).mean(-1, keepdim=True))
    return rows


def answer(prompt: list[int], longest: int) -> list[int]:
    """Token ids that the toy answers: a length and values that follow from the prompt."""
    chosen = random.Random(repr(prompt))
    return [chosen.randrange(256) for _ in range(chosen.randint(1, longest))]


def written(submit: Submit) -> list[int]:
    """Token ids that the toy writes as a prompt: printable ones that follow from the seed, and the end of the turn."""
    assert submit.sampling is not None
    chosen = random.Random(submit.seed)
    ids = [chosen.randrange(94) for _ in range(chosen.randint(1, submit.max_new_tokens - 1))]
    return [*ids, submit.sampling.stop_token_ids[-1]]


class ToyExtractor:
    """Stands where `Extractor` stands."""

    log_path = Path("vllm.log")

    def __init__(self, capacity_tokens: int, world_size: int, directory: Path) -> None:
        self._arena = Arena.create(capacity_tokens, 4, NUM_LAYERS, HIDDEN, "float32")
        listen = directory / "hub" if world_size > 1 else None
        self._hub = Hub(self._arena.layout.num_blocks, 4, world_size, listen, max_running=256)
        self.handle = QueueHandle(self._arena.path, self._arena.layout, str(listen) if listen else None, 16, 20.0, 0.5)
        self._queue: SampleQueue | None = None
        self._closed = False
        self.made = (0, 0)  # rows of prompts and of answers

    def start(self) -> None:
        self._hub.start()
        ours, theirs = socket.socketpair()
        self._hub.attach_producer(theirs, 0)
        self._thread = threading.Thread(target=self._serve, args=(Channel(ours),), daemon=True)
        self._thread.start()

    def queue(self, rank: int = 0) -> SampleQueue:
        if self._queue is None:
            ours, theirs = socket.socketpair()
            self._hub.attach_rank(theirs, rank)
            self._queue = SampleQueue(ours, self._arena, self.handle)
        return self._queue

    def end_producer(self) -> None:
        self._hub.shutdown_producer()
        self._thread.join(5.0)
        assert not self._thread.is_alive(), "the hub did not pass the shutdown on"

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.end_producer()
        if self._queue is not None:
            self._queue.close()
        self._hub.close()
        self._arena.close()

    def _serve(self, channel: Channel) -> None:
        writer, shuffle = RowWriter(self._arena), random.Random(0)
        channel.send(Ready("0.0", "toy", NUM_LAYERS, HIDDEN, "float32", 0))
        waiting: list[Submit] = []
        try:
            while True:
                channel.send(Stats(*self.made))
                for message in channel.receive(0.01 if waiting else 0.2):
                    if isinstance(message, Shutdown):
                        return
                    assert isinstance(message, Submit)
                    waiting.append(message)
                shuffle.shuffle(waiting)
                for submit in waiting:
                    channel.send(self._make(submit, writer))
                waiting.clear()
        except ChannelClosed:
            return

    def _make(self, submit: Submit, writer: RowWriter) -> Sample:
        if submit.stream == "self":
            made = written(submit)
        else:
            made = answer(submit.prompt_ids, submit.max_new_tokens) if submit.max_new_tokens else []
        ids = submit.prompt_ids + made
        num_rows = len(ids) - 1 if made else len(ids)
        self.made = (self.made[0] + len(submit.prompt_ids), self.made[1] + num_rows - len(submit.prompt_ids))
        name = str(submit.serial)
        writer.begin(name, submit.serial, submit.blocks, len(submit.prompt_ids))
        step = writer.plan([name], np.array([num_rows]), np.array([0]))
        assert step is not None
        fed = ids[:num_rows]
        writer.write([step], states(fed), np.array(fed), np.ones(num_rows, dtype=bool))
        writer.forget(name)
        spans = [(len(submit.prompt_ids), len(ids))] if made else submit.spans
        return Sample(submit.serial, submit.stream, submit.index, submit.name, ids, len(submit.prompt_ids), spans,
                      num_rows, submit.blocks, "stop")  # fmt: skip


class ToyDataModule(HiddenStateDataModule):
    """The data module on the toy engine."""

    capacity_tokens = 2048
    num_engines = 0  # made so far

    def _check_engine(self) -> None:
        """The toy takes any options."""

    def _make_extractor(self, run_dir: Path, world_size: int) -> Any:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.num_engines += 1
        return ToyExtractor(self.capacity_tokens, world_size, run_dir)
