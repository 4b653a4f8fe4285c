"""From the device to the arena: how the states that the tap has taken get where they belong."""

import atexit
import threading
import time
from collections.abc import Sequence
from queue import Empty
from queue import SimpleQueue as Queue

import numpy as np
import torch
from torch import Tensor

from eagle3_lightning.extract.engine import STAGES
from eagle3_lightning.extract.rows import RowWriter, StepRows
from eagle3_lightning.stream.arena import ArenaLayout

STAGE_TIMEOUT_S = 60.0
STEPS_TOGETHER = 8  # whose rows are written at once
PAUSE_S = 0.05  # without a step; rows of the last ones before it come up to twice that later
PIECE_BYTES = 8 << 20  # copied to the host at a time: vLLM's own small copies get in between


class HostCopier:
    """States are in host memory already: write them where they belong."""

    def copy(self, writer: RowWriter, step: StepRows, layers: Sequence[Tensor], ids: Tensor) -> None:
        """Write a step's rows: of each layer [rows, H], and the token ids."""
        finite = torch.stack([layer.isfinite().all(dim=1) for layer in layers]).all(dim=0)
        writer.write([step], layers, ids.numpy(), finite.numpy())

    def drain(self) -> None:
        """Nothing waits."""


class _Stage:
    """Rows of steps that follow each other: where they are gathered on the GPU, and pinned memory to copy them to."""

    def __init__(self, num_tokens: int, layout: ArenaLayout, device: torch.device) -> None:
        shape = (num_tokens, layout.num_layers, layout.hidden_size)
        self.rows = torch.empty(shape, dtype=layout.torch_dtype, device=device)
        self.ids = torch.empty(num_tokens, dtype=torch.int32, device=device)
        self.host_rows = torch.empty(shape, dtype=layout.torch_dtype, pin_memory=True)
        self.host_ids = torch.empty(num_tokens, dtype=torch.int32, pin_memory=True)
        self.host_largest = torch.empty(num_tokens, dtype=torch.float32, pin_memory=True)
        self.copied = torch.cuda.Event()
        self.rows_a_piece = max(1, PIECE_BYTES * num_tokens // self.rows.nbytes)
        self.clear()

    def clear(self) -> None:
        """Forget what has been written."""
        self.writer: RowWriter | None = None
        self.steps: list[StepRows] = []
        self.used = 0  # rows
        self.last_s = 0.0  # when the last step was added
        self.stream: torch.cuda.Stream | None = None  # that the steps ran on

    def add(self, writer: RowWriter, step: StepRows, layers: Sequence[Tensor], ids: Tensor) -> None:
        """Gather a step's rows, behind it on the current stream."""
        start, end = self.used, self.used + step.num_rows
        torch.stack(layers, dim=1, out=self.rows[start:end])  # type: ignore[arg-type]
        self.ids[start:end].copy_(ids)
        self.stream = torch.cuda.current_stream(self.rows.device)
        self.steps.append(step)
        self.writer, self.used, self.last_s = writer, end, time.monotonic()

    def send(self, stream: torch.cuda.Stream) -> None:
        """Queue the copy of all rows to the host on `stream`."""
        assert self.stream is not None
        with torch.cuda.stream(stream):
            stream.wait_stream(self.stream)
            rows = self.rows[: self.used]
            # The largest magnitude of a row is finite if and only if the whole row is, and takes one kernel.
            largest = torch.linalg.vector_norm(rows.flatten(1), ord=float("inf"), dim=1, dtype=torch.float32)
            self.host_largest[: self.used].copy_(largest, non_blocking=True)
            self.host_ids[: self.used].copy_(self.ids[: self.used], non_blocking=True)
            for start in range(0, self.used, self.rows_a_piece):
                piece = slice(start, min(start + self.rows_a_piece, self.used))
                self.host_rows[piece].copy_(self.rows[piece], non_blocking=True)
            self.copied.record()

    def write(self) -> None:
        """Wait for the copy and write the rows to the arena."""
        self.copied.synchronize()
        finite = np.isfinite(self.host_largest[: self.used].numpy())
        assert self.writer is not None
        self.writer.write(self.steps, self.host_rows[: self.used], self.host_ids[: self.used].numpy(), finite)


class DeviceCopier:
    """Gathers the states on the GPU, copies them to pinned memory on a side stream, writes them from a thread.

    The model's outputs may be static buffers of CUDA graphs, which the next step overwrites: what reads them is queued
    on the main stream, before that step. The thread keeps the order of the steps, on which the arena relies. All that a
    step costs vLLM's thread is two kernels; the rest is done for several steps at once, since whenever the writing
    thread goes on, vLLM's has to let go of Python's lock and to wait for it again.
    """

    def __init__(self, layout: ArenaLayout, max_num_tokens: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._max_num_tokens = max_num_tokens
        self._free: Queue[_Stage] = Queue()
        for _ in range(STAGES):
            self._free.put(_Stage(max_num_tokens, layout, device))
        self._open: _Stage | None = None  # is being filled
        self._full: Queue[_Stage] = Queue()
        self._handing_over = threading.Lock()
        self._error: BaseException | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._write, name="eagle3-rows", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def _end(self) -> None:
        """Python's own end would abort in the thread while that computes."""
        self._ending = True
        self._thread.join(STAGE_TIMEOUT_S)

    def copy(self, writer: RowWriter, step: StepRows, layers: Sequence[Tensor], ids: Tensor) -> None:
        """Take over a step's rows: of each layer [rows, H], and the token ids.

        Raises:
            RuntimeError: rows of an earlier step could not be written, or have not been for a minute.
        """
        with self._handing_over:
            if self._open is not None and self._open.used + step.num_rows > self._max_num_tokens:
                self._hand_over()
            if self._open is None:
                self._open = self._free_stage()
            self._open.add(writer, step, layers, ids)
            full = self._open.used + step.num_rows > self._max_num_tokens  # for another one like it
            if full or len(self._open.steps) == STEPS_TOGETHER:
                self._hand_over()

    def drain(self) -> None:
        """Wait until every row is in its arena; no step may be under way."""
        with self._handing_over:
            self._hand_over()
        for stage in [self._free_stage() for _ in range(STAGES)]:
            self._free.put(stage)

    def _hand_over(self) -> None:
        if self._open is not None:
            self._open.send(self._stream)
            self._full.put(self._open)
            self._open = None

    def _free_stage(self) -> _Stage:
        try:
            stage = self._free.get(timeout=STAGE_TIMEOUT_S)
        except Empty:
            raise RuntimeError(f"rows were not written to the arena for {STAGE_TIMEOUT_S:.0f} s") from self._error
        if self._error is not None:
            raise RuntimeError("rows could not be written to the arena") from self._error
        return stage

    def _write(self) -> None:
        # Others would spin for work beside vLLM's; threads that have used torch keep theirs. And with one thread the
        # later of two rows for one place wins, as it must where a late row of an old owner comes with the next one's.
        torch.set_num_threads(1)
        while not self._ending:
            try:
                stage = self._full.get(timeout=PAUSE_S)
            except Empty:
                stage = None
            try:
                if stage is None:
                    self._close_old()
                else:
                    stage.write()
            except BaseException as error:  # raised by the next copy, in the worker's main thread
                self._error = error
            if stage is not None:
                stage.clear()
                self._free.put(stage)

    def _close_old(self) -> None:
        """vLLM may have nothing to do: what waits for the next step waits no longer."""
        if not self._handing_over.acquire(blocking=False):
            return  # a step is being added, and may wait in there for a stage that this very thread is to write
        try:
            if self._open is not None and time.monotonic() - self._open.last_s >= PAUSE_S:
                self._hand_over()
        finally:
            self._handing_over.release()
