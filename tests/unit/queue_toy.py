"""An engine without a model behind the producer's Engine interface: the queue is what is under test, not vLLM.

Its "states" are the token ids themselves, so that a swapped, lost or stale row is seen at once. As a program it is a
producer process of its own: `python queue_toy.py SOCKET_FD ARENA_PATH LAYOUT_JSON`.
"""

import os
import random
import socket
import sys
import time

import msgspec
import numpy as np
import torch

from eagle3_lightning.extract.engine import Finished
from eagle3_lightning.extract.producer import serve
from eagle3_lightning.extract.rows import RowWriter
from eagle3_lightning.stream.arena import Arena, ArenaLayout
from eagle3_lightning.stream.channel import Channel
from eagle3_lightning.stream.messages import Ready, Submit

MAX_RUNNING = 8


class ToyEngine:
    """Serves some requests at once, in chunks and steps, and finishes them in an order of its own."""

    def __init__(self, seed: int = 0, delay_s: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._waiting: list[Submit] = []
        self._running: dict[str, tuple[Submit, list[int], int]] = {}  # request, all its tokens, position

    def attach(self, arena_path: str, arena_layout: ArenaLayout) -> None:
        self.arena = Arena.open(arena_path, arena_layout)
        self._writer = RowWriter(self.arena)

    @property
    def num_running(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, request: Submit) -> None:
        if request.name == "refuse me":
            raise ValueError("over max_model_len, says the toy")
        self._waiting.append(request)

    def step(self) -> list[Finished]:
        if self._delay_s:
            time.sleep(self._random.random() * self._delay_s)
        while self._waiting and len(self._running) < MAX_RUNNING:
            self._begin(self._waiting.pop(0))
        names = [name for name in self._running if self._random.random() < 0.8]
        self._random.shuffle(names)
        counts = [self._next_chunk(*self._running[name]) for name in names]
        self._write(names, counts)
        finished = []
        for name, count in zip(names, counts, strict=True):
            request, tokens, position = self._running[name]
            self._running[name] = (request, tokens, position + count)
            if position + count == len(tokens) - 1:
                finished.append(self._finish(name))
        return finished

    def _begin(self, request: Submit) -> None:
        num_answer = 1 + request.index % request.max_new_tokens if request.max_new_tokens else 1
        answer = [request.prompt_ids[0] + len(request.prompt_ids) + i for i in range(num_answer)]
        self._running[str(request.serial)] = (request, request.prompt_ids + answer, 0)
        self._writer.begin(str(request.serial), request.serial, request.blocks, len(request.prompt_ids))

    def _next_chunk(self, request: Submit, tokens: list[int], position: int) -> int:
        prompt_left = len(request.prompt_ids) - position
        return min(prompt_left, self._random.randint(1, 40)) if prompt_left > 0 else 1

    def _write(self, names: list[str], counts: list[int]) -> None:
        firsts = [self._running[name][2] for name in names]
        step = self._writer.plan(names, np.array(counts, np.int64), np.array(firsts, np.int64)) if names else None
        if step is None:
            return
        fed = [t for name, c, f in zip(names, counts, firsts, strict=True) for t in self._running[name][1][f : f + c]]
        ids = torch.tensor(fed)
        rows = ids.to(self.arena.rows.dtype)[:, None, None].expand(len(fed), *self.arena.rows.shape[1:]).contiguous()
        self._writer.write([step], rows, ids.numpy(), np.ones(len(fed), bool))

    def _finish(self, name: str) -> Finished:
        request, tokens, _ = self._running.pop(name)
        self._writer.forget(name)
        answer = tokens[len(request.prompt_ids) :]
        reason = "length" if len(answer) == request.max_new_tokens else "stop"
        return Finished(int(name), answer, "abort" if request.name == "abort me" else reason)

    def close(self) -> None:
        pass


def serve_toy(channel: Channel, engine: ToyEngine, path: str, layout: ArenaLayout) -> int:
    """Run the producer's own loop on a toy engine."""

    def start():
        engine.attach(path, layout)
        ready = Ready("toy", "toy", layout.num_layers, layout.hidden_size, layout.dtype, os.getpid())
        return engine, engine.arena, ready

    return serve(channel, start)


if __name__ == "__main__":
    made = msgspec.json.decode(sys.argv[3].encode(), type=ArenaLayout)
    sys.exit(serve_toy(Channel(socket.socket(fileno=int(sys.argv[1]))), ToyEngine(delay_s=0.0005), sys.argv[2], made))
