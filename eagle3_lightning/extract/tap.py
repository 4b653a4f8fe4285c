"""The patched extractor: a vLLM worker that copies hidden states out between the two phases of a step.

vLLM's model runner runs the forward pass in `execute_model` and keeps its results in `execute_model_state`, until
`sample_tokens` takes them. In between, the tap reads the auxiliary states, the last state after the final norm and the
token ids, and puts the rows of captured requests into the arena. A request is captured if its sampling parameters say
`extra_args = {"eagle3": {"serial": n, "blocks": [...]}}`.

Everything that is private to vLLM is touched in this file alone; vLLM 0.16.0 to 0.33.0, V1 and V2 model runners.
"""

import atexit
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from queue import SimpleQueue as Queue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from eagle3_lightning.extract.engine import CONFIG_KEY, PROCESS_ENV, STAGES, TapProcesses, TapSettings
from eagle3_lightning.extract.rows import IntArray, RowWriter, StepRows
from eagle3_lightning.extract.watchdog import watch
from eagle3_lightning.layers import to_vllm
from eagle3_lightning.stream.arena import Arena, ArenaLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

STAGE_TIMEOUT_S = 60.0
STEPS_TOGETHER = 8  # whose rows are written at once
PAUSE_S = 0.05  # without a step; rows of the last ones before it come up to twice that later
PIECE_BYTES = 8 << 20  # copied to the host at a time: vLLM's own small copies get in between


class _TapMixin:
    """What the tap adds to a vLLM worker. The producer calls methods named `eagle3_*` through collective_rpc."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _writer: RowWriter | None = None
    _copier: "_HostCopier | _DeviceCopier | None" = None

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model, then ask it for the auxiliary states, before anything is profiled, compiled or captured."""
        self._live_with_the_trainer()
        loaded = super().load_model(*args, **kwargs)  # type: ignore[misc]
        self._settings = msgspec.convert(self.vllm_config.additional_config[CONFIG_KEY], TapSettings)
        model = self.model_runner.get_model()
        self._order = _StepOrder()
        self._hooks: _LayerHooks | None = None
        if supports_eagle3(model):
            model.set_aux_hidden_state_layers(to_vllm(self._settings.aux_layers))
            self.model_runner.use_aux_hidden_state_outputs = True
        else:
            if not self.vllm_config.model_config.enforce_eager:
                raise ValueError(
                    f"{type(model).__name__} hands out no auxiliary states in this vLLM; forward hooks can take "
                    "them, but only without compilation: set data.engine.enforce_eager to true"
                )
            self._hooks = _LayerHooks(decoder_layers(model, self._settings.num_layers), self._settings.aux_layers)
        return loaded

    def _live_with_the_trainer(self) -> None:
        processes = msgspec.json.decode(os.environ[PROCESS_ENV], type=TapProcesses)
        if os.getpid() != processes.producer_pid:  # an engine inside the producer is watched over already
            watch(processes.trainer_pid, processes.producer_pid, Path(processes.private_dir))

    def eagle3_attach(self, arena_path: str, arena_layout: dict[str, Any]) -> None:
        """Write the rows of requests that come from now on to this arena. Only the first tensor-parallel rank does."""
        if self.rank != 0:
            return
        layout = msgspec.convert(arena_layout, ArenaLayout)
        runner_dtype = str(self.model_runner.model_config.dtype).removeprefix("torch.")
        if runner_dtype != layout.dtype:
            raise ValueError(f"vLLM runs the target in {runner_dtype} and the arena holds {layout.dtype}")
        if self._writer is not None:
            assert self._copier is not None
            self._copier.drain()
            self._writer.close()
        self._writer = RowWriter(Arena.open(arena_path, layout))
        if self._copier is None:
            num_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            on_cpu = current_platform.is_cpu()
            self._copier = _HostCopier() if on_cpu else _DeviceCopier(layout, num_tokens, self.model_runner.device)

    def eagle3_describe(self) -> str:
        """How this worker captures, for example `aux/v1`."""
        return f"{'hooks' if self._hooks else 'aux'}/{'v2' if _is_v2(self.model_runner) else 'v1'}"

    def eagle3_perturb(self, layer: int, whole_layer: bool) -> None:
        """Change a decoder layer, for the self-check; `eagle3_restore` undoes it.

        Only weights of norms are touched, in place: compiled code and CUDA graphs read them from where they are, every
        tensor-parallel rank has all of them, and no quantization packs them.

        Args:
            layer: our id.
            whole_layer: all norms of the layer; otherwise only the one that acts last.
        """
        norms = _norm_weights(decoder_layers(self.model_runner.get_model(), self._settings.num_layers)[layer])
        self._saved = [(weight, weight.clone()) for weight in (norms if whole_layer else norms[-1:])]
        with torch.no_grad():
            for weight, _ in self._saved:
                weight.mul_(4).add_(1)  # also where the norm multiplies by 1 + weight

    def eagle3_restore(self) -> None:
        """Undo `eagle3_perturb`."""
        with torch.no_grad():
            for weight, saved in self._saved:
                weight.copy_(saved)
        self._saved = []

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """The forward pass, and behind it the capture of its rows."""
        output = super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self._writer is not None:
            assert self._copier is not None
            self._capture(self._writer, self._copier, scheduler_output)
        return output

    def _capture(self, writer: RowWriter, copier: "_HostCopier | _DeviceCopier", scheduled: "SchedulerOutput") -> None:
        for request_id in scheduled.finished_req_ids:
            writer.forget(request_id)
        for new in scheduled.scheduled_new_reqs:
            where = ((new.sampling_params and new.sampling_params.extra_args) or {}).get(CONFIG_KEY)
            if where is not None:
                writer.begin(new.req_id, where["serial"], where["blocks"], where["prompt_tokens"])
        state = self.model_runner.execute_model_state
        if state is None or not scheduled.total_num_scheduled_tokens:
            return
        step = writer.plan(*self._order.of(self.model_runner, state, scheduled))
        if step is None:
            return
        num_rows = scheduled.total_num_scheduled_tokens
        aux = self._hooks.states if self._hooks else state.aux_hidden_states
        layers = [layer[:num_rows] for layer in (*aux, state.hidden_states)]
        copier.copy(writer, step, layers, _input_ids(self.model_runner, state)[:num_rows])


class GpuTapWorker(_TapMixin, Worker):
    """`worker_cls` on CUDA."""


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker

    class CpuTapWorker(_TapMixin, CPUWorker):
        """`worker_cls` on the CPU."""


# -- what differs between the model runners ------------------------------------------------------------------------


def _is_v2(runner: Any) -> bool:
    # V2 batches are made anew for each step and kept in its state; V1 has one that lasts.
    return not hasattr(runner, "input_batch")


class _StepOrder:
    """The requests of a step in the order of their rows, how many rows each has and at which position they begin.

    The order is the runner's own: neither that of submission nor that of the scheduler. The positions are the
    scheduler's; without speculative decoding they are exact, with asynchronous scheduling as well.
    """

    def __init__(self) -> None:
        self._known: tuple[list[str], list[str]] = [], []  # ids as the scheduler and as the runner had them last
        self._places = np.empty(0, np.int64)  # of the runner's requests among the scheduler's

    def of(self, runner: Any, state: Any, scheduled: "SchedulerOutput") -> tuple[list[str], IntArray, IntArray]:
        request_ids = list(state.input_batch.req_ids if _is_v2(runner) else runner.input_batch.req_ids)
        cached, new = scheduled.scheduled_cached_reqs, scheduled.scheduled_new_reqs
        if new or scheduled.total_num_scheduled_tokens != len(request_ids):
            computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            computed.update((request.req_id, request.num_computed_tokens) for request in new)
            counts = scheduled.num_scheduled_tokens
            num_tokens = np.array([counts[r] for r in request_ids], np.int64)
            return request_ids, num_tokens, np.array([computed[r] for r in request_ids], np.int64)
        # One token each of requests that ran before, as in most steps: little of vLLM's time may go into it.
        if self._known != (cached.req_ids, request_ids):
            place_of = {request_id: place for place, request_id in enumerate(cached.req_ids)}
            self._known = list(cached.req_ids), request_ids
            self._places = np.array([place_of[r] for r in request_ids], np.int64)
        computed_tokens = np.array(cached.num_computed_tokens, np.int64)
        return request_ids, np.ones(len(request_ids), np.int64), computed_tokens[self._places]


def _input_ids(runner: Any, state: Any) -> Tensor:
    """The token ids that the forward pass was fed, on its device (asynchronous scheduling knows them nowhere else)."""
    ids: Tensor = state.input_batch.input_ids if _is_v2(runner) else runner.input_ids.gpu
    return ids


def decoder_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The stack of decoder layers: the one list of `num_layers` modules that the model calls its layers."""
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and name.rpartition(".")[2] in ("layers", "h", "blocks")
    }
    language = {name: m for name, m in found.items() if "vision" not in name and "visual" not in name} or found
    if len(language) != 1:
        raise ValueError(f"no single list of {num_layers} decoder layers in {type(model).__name__}: {sorted(language)}")
    return next(iter(language.values()))


def _norm_weights(layer: nn.Module) -> list[Tensor]:
    """Weights of the norms of a decoder layer, as direct children, in the order in which vLLM's models define them."""
    named = list(layer.named_parameters())
    weights: list[Tensor] = [w for name, w in named if "norm" in name and name.count(".") == 1 and w.dim() == 1]
    if not weights:
        raise ValueError(f"{type(layer).__name__} has no norm whose weight the self-check could change")
    return weights


class _LayerHooks:
    """Forward hooks on decoder layers, for models that hand out no auxiliary states. Useless under compilation.

    Attributes:
        states: outputs of the layers in the last forward pass, in the order asked for.
    """

    def __init__(self, layers: nn.ModuleList, wanted: Sequence[int]) -> None:
        self.states: list[Tensor] = [torch.empty(0)] * len(wanted)
        for place, number in enumerate(wanted):
            layers[number].register_forward_hook(self._keep(place))

    def _keep(self, place: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # vLLM's layers mostly return (what the layer adds, the residual stream before it), unadded.
            if isinstance(output, tuple):
                hidden, residual = output[0], output[1]
                self.states[place] = hidden if residual is None else hidden + residual
            else:
                self.states[place] = output

        return hook


# -- from the device to the arena ----------------------------------------------------------------------------------


class _HostCopier:
    """States are in host memory already: write them where they belong."""

    def copy(self, writer: RowWriter, step: StepRows, layers: Sequence[Tensor], ids: Tensor) -> None:
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


class _DeviceCopier:
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
