"""The patched extractor: a vLLM worker that copies hidden states out between the two phases of a step.

vLLM's model runner runs the forward pass in `execute_model` and keeps its results in `execute_model_state`, until
`sample_tokens` takes them. In between, the tap reads the auxiliary states, the last state after the final norm and the
token ids, and puts the rows of captured requests into the arena. A request is captured if its sampling parameters say
`extra_args = {"eagle3": {"serial": n, "blocks": [...]}}`.

Everything that is private to vLLM is touched in this file alone; vLLM 0.16.0 to 0.33.0, V1 and V2 model runners.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from eagle3_lightning.extract.copiers import DeviceCopier, HostCopier
from eagle3_lightning.extract.engine import CONFIG_KEY, PROCESS_ENV, TapProcesses, TapSettings
from eagle3_lightning.extract.rows import IntArray, RowWriter
from eagle3_lightning.extract.watchdog import watch
from eagle3_lightning.layers import to_vllm
from eagle3_lightning.stream.arena import Arena, ArenaLayout

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _TapMixin:
    """What the tap adds to a vLLM worker. The producer calls methods named `eagle3_*` through collective_rpc."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _writer: RowWriter | None = None
    _copier: "HostCopier | DeviceCopier | None" = None

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
            self._copier = HostCopier() if on_cpu else DeviceCopier(layout, num_tokens, self.model_runner.device)

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

    def _capture(self, writer: RowWriter, copier: "HostCopier | DeviceCopier", scheduled: "SchedulerOutput") -> None:
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
