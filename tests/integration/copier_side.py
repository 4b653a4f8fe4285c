"""The tap's copier from the GPU, on the CPU: `python copier_side.py order|room|fault|end`.

Streams, events and pinned memory are CUDA's and stand still here; stages, threads and the order of the rows are real.
In a process of its own, since it replaces what torch has of CUDA.
"""

import contextlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from eagle3_lightning.extract import copiers
from eagle3_lightning.extract.rows import RowWriter, StepRows
from eagle3_lightning.stream.arena import Arena

HIDDEN, BLOCK_TOKENS, MAX_TOKENS = 16, 4, 64
NOT_FINITE = 251  # a token id whose row is not
Put = Callable[[StepRows, list[int]], None]


class NoCuda:
    """A stream or an event where nothing is asynchronous."""

    def __init__(self, *args: Any) -> None:
        """Nothing to prepare."""

    def wait_stream(self, other: Any) -> None:
        """Everything is done already."""

    record = synchronize = lambda self: None


def replace_cuda() -> None:
    """What the copier asks CUDA for, on the CPU."""
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)  # type: ignore[assignment]
    torch.cuda.Event = torch.cuda.Stream = NoCuda  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.current_stream = NoCuda  # type: ignore[assignment]


def serve(writer: RowWriter, put: Put, pause_s: float) -> None:
    """Requests that finish early, run one row more, and whose spare blocks are taken before that row has come."""
    choose, pause = random.Random(0), random.Random(1)
    free, running, serial = list(range(60, 0, -1)), {}, 0
    for _ in range(400):
        while len(running) < 10 and len(free) >= 6:
            serial += 1
            blocks = [free.pop() for _ in range(6)]
            running[str(serial)] = [blocks, 0, choose.randint(1, 8), choose.randint(9, 23)]
            writer.begin(str(serial), serial, blocks, running[str(serial)][2])
        parts = [(name, done, prompt - done if done < prompt else 1) for name, (_, done, prompt, _) in running.items()]
        parts += [("0", 0, 2)] * (choose.random() < 0.3)  # nobody's
        choose.shuffle(parts)
        step = writer.plan([n for n, *_ in parts], *(np.array([part[i] for part in parts]) for i in (2, 1)))
        assert step is not None
        ids = [(int(n) * 31 + p) % 250 if n != "0" else NOT_FINITE for n, f, c in parts for p in range(f, f + c)]
        put(step, ids)
        for name, first, count in parts:
            if name == "0":
                continue
            blocks, _, prompt, length = running[name]
            num_kept = -(-length // BLOCK_TOKENS)
            if first + count == length:
                free += blocks[num_kept:]
            elif first + count > length:
                writer.forget(name)
                free += blocks[:num_kept]
                del running[name]
                continue
            running[name] = [blocks, first + count, prompt, length]
        if pause.random() < 0.03:
            time.sleep(pause_s)


def states(ids: list[int]) -> list[torch.Tensor]:
    """Two layers of these tokens."""
    rows = torch.tensor(ids, dtype=torch.bfloat16)[:, None].expand(-1, HIDDEN)
    return [rows, rows.masked_fill(rows == NOT_FINITE, float("nan"))]


def make() -> tuple[Arena, RowWriter]:
    """An arena and its writer."""
    arena = Arena.create(512, BLOCK_TOKENS, 2, HIDDEN, "bfloat16")
    return arena, RowWriter(arena)


def order() -> None:
    """What the copier has written is what the steps one by one would have."""
    (one_by_one, direct), (together, writer) = make(), make()

    def put_directly(step: StepRows, ids: list[int]) -> None:
        direct.write([step], torch.stack(states(ids), 1), np.array(ids), np.array(ids) != NOT_FINITE)

    serve(direct, put_directly, 0.0)
    copier = copiers.DeviceCopier(together.layout, MAX_TOKENS, torch.device("cpu"))
    serve(writer, lambda step, ids: copier.copy(writer, step, states(ids), torch.tensor(ids)), 2.5 * copiers.PAUSE_S)
    copier.drain()
    for name in ("ids", "finite", "headers", "counters"):
        assert torch.equal(getattr(one_by_one, name), getattr(together, name)), name
    assert torch.equal(one_by_one.rows.view(torch.int16), together.rows.view(torch.int16))
    assert int(together.counters[2]) == 400


def room() -> None:
    """A step that waits for a stage is not waited for by the thread that is to write the stages."""
    copiers.STAGE_TIMEOUT_S = 5.0
    arena, writer = make()
    writer.begin("1", 1, list(range(20)), 8)
    step = writer.plan(["1"], np.array([3]), np.array([0]))
    assert step is not None
    copier = copiers.DeviceCopier(arena.layout, MAX_TOKENS, torch.device("cpu"))
    with copier._handing_over:  # as `copy` does
        time.sleep(4 * copiers.PAUSE_S)  # nothing to write: the thread looks for what is old
        for _ in range(copiers.STAGES + 1):
            stage = copier._free_stage()
            stage.add(writer, step, states([1, 2, 3]), torch.tensor([1, 2, 3]))
            stage.send(copier._stream)
            copier._full.put(stage)


def fault() -> None:
    """What fails in the thread while vLLM has nothing to do ends the next step, and not after a deadline."""
    arena, writer = make()
    writer.begin("1", 1, list(range(20)), 8)

    def fail(stage: copiers._Stage, stream: Any) -> None:
        raise OSError("the copy could not be queued")

    send, copiers._Stage.send = copiers._Stage.send, fail  # type: ignore[method-assign]
    copier = copiers.DeviceCopier(arena.layout, MAX_TOKENS, torch.device("cpu"))
    put = iter(range(100))

    def step() -> None:
        planned = writer.plan(["1"], np.array([1]), np.array([next(put)]))
        assert planned is not None
        copier.copy(writer, planned, states([1]), torch.tensor([1]))

    step()
    time.sleep(4 * copiers.PAUSE_S)
    copiers._Stage.send = send  # type: ignore[method-assign]

    def some_steps() -> None:
        for _ in range(2 * copiers.STEPS_TOGETHER):
            step()

    with pytest.raises(RuntimeError, match="rows could not be written") as told:
        some_steps()
    assert isinstance(told.value.__cause__, OSError)


def end() -> None:
    """Python ends while the thread computes; it would be killed in torch, and the process with it."""
    arena, writer = make()
    writer.begin("1", 1, list(range(20)), 8)
    write = copiers._Stage.write

    def write_for_long(stage: copiers._Stage) -> None:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            torch.ones(8, 8).sum(dim=0).tolist()
        write(stage)
        print("written", flush=True)

    copiers._Stage.write = write_for_long  # type: ignore[method-assign]
    copier = copiers.DeviceCopier(arena.layout, MAX_TOKENS, torch.device("cpu"))
    for place in range(copiers.STEPS_TOGETHER):
        step = writer.plan(["1"], np.array([1]), np.array([place]))
        assert step is not None
        copier.copy(writer, step, states([1]), torch.tensor([1]))
    time.sleep(0.1)


if __name__ == "__main__":
    replace_cuda()
    {"order": order, "room": room, "fault": fault, "end": end}[sys.argv[1]]()
