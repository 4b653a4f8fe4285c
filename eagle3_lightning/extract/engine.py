"""vLLM as the producer uses it: requests in, finished answers out, their rows in an arena."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.extract import versions
from eagle3_lightning.extract.refusals import check_known, started
from eagle3_lightning.extract.watchdog import ChildGuard
from eagle3_lightning.options import EngineOptions, QueueOptions
from eagle3_lightning.stream.arena import ArenaLayout
from eagle3_lightning.stream.messages import Sampling, Submit
from eagle3_lightning.target import read_config

CONFIG_KEY = "eagle3"  # of the tap, in additional_config and in a request's extra_args
STAGES = 3  # of captured rows, each as large as a forward pass, on their way from the GPU to the arena
PROCESS_ENV = "EAGLE3_TAP"

# Engine arguments that the project sets itself, and why a user cannot have them otherwise.
OWN_ARGUMENTS = {
    "model": "it is target.path",
    "tokenizer": "prompts are tokenized by the trainer",
    "skip_tokenizer_init": "prompts are tokenized by the trainer",
    "trust_remote_code": "it is target.trust_remote_code",
    "dtype": "it is data.engine.dtype",
    "max_model_len": "it is data.engine.max_model_len",
    "max_num_seqs": "it is data.engine.max_num_seqs",
    "max_num_batched_tokens": "it is data.engine.max_num_batched_tokens",
    "tensor_parallel_size": "it is data.engine.tensor_parallel_size",
    "gpu_memory_utilization": "it is data.engine.gpu_memory_utilization",
    "enforce_eager": "it is data.engine.enforce_eager",
    "disable_log_stats": "the producer counts by itself, and the bench needs vLLM's statistics",
    "generation_config": "answers are sampled by data.sampling alone",
    "language_model_only": "prompts are text",
    "enable_prefix_caching": "a cached token runs through no layer, so its states would be missing",
    "worker_cls": "the worker is the tap that captures the states",
    "additional_config": "the tap reads it",
    "speculative_config": "the states are those of the target alone",
    "pipeline_parallel_size": "states of earlier stages never reach the worker that hands them out",
    "data_parallel_size": "one engine serves one queue",
    "kv_transfer_config": "a connector may load tokens that run through no layer",
}


class TapSettings(msgspec.Struct, frozen=True):
    """What the tap must know before the model is loaded, in `additional_config`.

    vLLM hashes `additional_config` into the key of its compilation cache, without which a graph compiled for other
    layers would be reused; so nothing that differs from run to run may stand here.

    Attributes:
        aux_layers: our ids of the auxiliary layers.
        num_layers: decoder layers of the target.
    """

    aux_layers: tuple[int, ...]
    num_layers: int


class TapProcesses(msgspec.Struct, frozen=True):
    """Whom a worker lives with, as JSON in the environment variable PROCESS_ENV.

    Attributes:
        trainer_pid: rank 0 of the trainer.
        producer_pid: the producer.
        private_dir: of the run's sockets.
    """

    trainer_pid: int
    producer_pid: int
    private_dir: str


class EngineSettings(msgspec.Struct, frozen=True):
    """Everything that the engine needs, as plain values.

    Attributes:
        model_path: the target's directory.
        dtype: of weights and states, explicit.
        aux_layers: our ids of the auxiliary layers.
        num_layers: decoder layers N.
        max_model_len: prompt and answer.
        max_num_seqs: see EngineOptions.
        max_num_batched_tokens: see EngineOptions.
        tensor_parallel_size: see EngineOptions.
        gpu_memory_utilization: see EngineOptions.
        kv_cache_gib: see EngineOptions.
        enforce_eager: see EngineOptions.
        cpu_threads: see EngineOptions.
        trust_remote_code: see TargetOptions.
        extra: see EngineOptions.
        sampling: of requests that bring none of their own.
    """

    model_path: str
    dtype: str
    aux_layers: tuple[int, ...]
    num_layers: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int | None
    tensor_parallel_size: int
    gpu_memory_utilization: float
    kv_cache_gib: int
    enforce_eager: bool
    cpu_threads: int | None
    trust_remote_code: bool
    extra: dict[str, str | bool | int | float]
    sampling: Sampling = Sampling()


def check_extra(extra: dict[str, Any]) -> None:
    """Refuse engine arguments that collide with the project's own.

    Raises:
        ConfigError: one of them is set.
    """
    for name, value in extra.items():
        if name in OWN_ARGUMENTS:
            raise ConfigError(
                f"data.engine.extra.{name}", value, f"this project sets it: {OWN_ARGUMENTS[name]}", "Remove it."
            )


def check_capacity(engine: EngineOptions, queue: QueueOptions) -> None:
    """Refuse an arena that is smaller than a sample.

    Raises:
        ConfigError: a sample of `max_model_len` does not fit.
    """
    if engine.max_model_len > queue.capacity_tokens:
        raise ConfigError(
            "data.queue.capacity_tokens",
            queue.capacity_tokens,
            f"one sample of data.engine.max_model_len = {engine.max_model_len} tokens does not fit",
            "Raise it, or lower data.engine.max_model_len.",
        )


@dataclass
class Finished:
    """A request that vLLM has finished.

    Attributes:
        serial: of the reservation.
        answer_ids: tokens that it made.
        finish_reason: `stop` or `length`; `abort` if vLLM gave up.
        logprobs: of the answer's tokens, where they were asked for.
        prompt_logprobs: of the prompt's tokens but the first, where they were asked for.
    """

    serial: int
    answer_ids: list[int]
    finish_reason: str
    logprobs: list[float] | None = None
    prompt_logprobs: list[float] | None = None


class Engine(Protocol):
    """What the producer's loop needs of an engine."""

    def attach(self, arena_path: str, arena_layout: ArenaLayout) -> None:
        """Write the rows of later requests to this arena."""

    def submit(self, request: Submit) -> None:
        """Take a request on; ValueError if it can never be served."""

    def step(self) -> list[Finished]:
        """Run on; called only while `num_running` is not 0. What has finished since the last call."""

    @property
    def num_running(self) -> int:
        """Requests taken on and not finished."""

    def close(self) -> None:
        """Stop."""


def prepare_environment(settings: EngineSettings, trainer_pid: int, private_dir: Path) -> None:
    """Set what vLLM and its workers read from the environment; before vllm is imported for the first time.

    Raises:
        ConfigError: the user's environment asks for a model runner that hands out no states.
    """
    found = versions.installed()
    assert found is not None
    processes = TapProcesses(trainer_pid, os.getpid(), str(private_dir))
    ours = {
        PROCESS_ENV: msgspec.json.encode(processes).decode(),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_RPC_BASE_PATH": str(private_dir),  # its sockets go with ours
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
    }
    defaults = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer lives on the same cores
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_COLOR": "0",
        "HF_HUB_OFFLINE": "1",  # the target is a local directory by now
    }
    model_path = Path(settings.model_path)
    seeing = "vision_config" in read_config(model_path, settings.model_path)
    # Beside an image processor that imports numba (Kimi-K2.5's), a worker of vLLM 0.32 does not start.
    if not torch.cuda.is_available() and settings.tensor_parallel_size == 1 and not seeing:
        # Engine core and worker inside the producer: one import of vLLM instead of three, 10 s to start instead of 23,
        # and on a CPU there is no second device that separate processes could keep busy.
        defaults["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.cpu_threads is not None:
        ours["OMP_NUM_THREADS"] = str(settings.cpu_threads)
    if not versions.v2_runner_has_states(found[1]):
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") not in ("0", "false"):
            raise ConfigError(
                "VLLM_USE_V2_MODEL_RUNNER",
                os.environ["VLLM_USE_V2_MODEL_RUNNER"],
                f"the V2 runner of vLLM {found[1]} hands out no auxiliary states",
                "Unset it.",
            )
        ours["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    os.environ.update(ours)


class VllmEngine:
    """vLLM's own LLMEngine with the tap as its worker."""

    def __init__(self, settings: EngineSettings, on_death: Callable[[str], None]) -> None:
        """Start vLLM; minutes on a large target.

        Args:
            settings: see EngineSettings. `prepare_environment` must have run.
            on_death: told from a thread which of vLLM's processes has died, if vLLM itself does not notice.
        """
        from vllm import EngineArgs, LLMEngine, SamplingParams
        from vllm.platforms import current_platform
        from vllm.sampling_params import RequestOutputKind

        check_known(settings.extra, EngineArgs.__dataclass_fields__)
        self.settings = settings
        self.on_cpu = current_platform.is_cpu()
        tap = TapSettings(settings.aux_layers, settings.num_layers)
        self._sampling_class, self._final_only = SamplingParams, RequestOutputKind.FINAL_ONLY
        optional: dict[str, Any] = {}
        if settings.max_num_batched_tokens is not None:
            optional["max_num_batched_tokens"] = settings.max_num_batched_tokens
        if "language_model_only" in EngineArgs.__dataclass_fields__:
            optional["language_model_only"] = True  # prompts are text: no vision tower is loaded or profiled
        arguments = EngineArgs(
            model=settings.model_path,
            dtype=settings.dtype,
            skip_tokenizer_init=True,
            trust_remote_code=settings.trust_remote_code,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enforce_eager=settings.enforce_eager or self.on_cpu,
            enable_prefix_caching=False,
            worker_cls=f"eagle3_lightning.extract.tap.{'CpuTapWorker' if self.on_cpu else 'GpuTapWorker'}",
            additional_config={CONFIG_KEY: msgspec.to_builtins(tap)},
            generation_config="vllm",
            disable_log_stats=True,
            **optional,
            **settings.extra,
        )
        self._engine = started(lambda: LLMEngine.from_engine_args(arguments), settings.extra)
        self._running: set[str] = set()
        self._guard = ChildGuard(on_death)

    @property
    def num_running(self) -> int:
        """Requests taken on and not finished."""
        return len(self._running)

    @property
    def tap(self) -> str:
        """How the workers capture, for example `aux/v1`."""
        return str(self.call_workers("eagle3_describe")[0])

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every tap worker; arguments and results are plain values."""
        return list(self._engine.collective_rpc(method, args=args))

    def attach(self, arena_path: str, arena_layout: ArenaLayout) -> None:
        """Write the rows of later requests to this arena."""
        self.call_workers("eagle3_attach", arena_path, msgspec.to_builtins(arena_layout))

    def submit(self, request: Submit) -> None:
        """Take a request on.

        Raises:
            ValueError: vLLM refuses it, for example as too long.
        """
        self._add(request, {})

    def submit_with_logprobs(self, request: Submit) -> None:
        """Like `submit`, and `Finished` will carry log-probabilities. For the self-check."""
        self._add(request, {"logprobs": 0, "prompt_logprobs": 0})

    def _add(self, request: Submit, logprobs: dict[str, int]) -> None:
        settings, asked = self.settings, request.sampling or self.settings.sampling
        room = settings.max_model_len - len(request.prompt_ids)
        if room < 1:
            raise ValueError(
                f"{len(request.prompt_ids)} tokens leave no room in max_model_len = {settings.max_model_len}"
            )
        sampling = self._sampling_class(
            max_tokens=min(max(request.max_new_tokens, 1), room),
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            # Seeded sampling kills vLLM 0.32 on the CPU ("CPU Generator does not use offset").
            seed=request.seed if asked.temperature > 0 and not self.on_cpu else None,
            stop_token_ids=list(asked.stop_token_ids),
            detokenize=False,
            output_kind=self._final_only,
            extra_args={
                CONFIG_KEY: {
                    "serial": request.serial,
                    "blocks": request.blocks,
                    "prompt_tokens": len(request.prompt_ids),
                }
            },
            **logprobs,
        )
        name = str(request.serial)
        self._engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, sampling)
        self._running.add(name)

    def step(self) -> list[Finished]:
        """Wait for vLLM's next results; what has finished with them.

        Raises:
            Exception: vLLM's own, when its engine core is dead.
        """
        finished = []
        for output in self._engine.step():
            if output.finished:
                self._running.discard(output.request_id)
                answer = output.outputs[0]
                finished.append(
                    Finished(
                        int(output.request_id),
                        list(answer.token_ids),
                        str(answer.finish_reason),
                        _chosen(answer.logprobs, answer.token_ids),
                        _chosen((output.prompt_logprobs or [])[1:], (output.prompt_token_ids or [])[1:]),
                    )
                )
        return finished

    def close(self) -> None:
        """Stop vLLM's processes."""
        self._guard.disarm()
        self._engine.engine_core.shutdown()


def _chosen(logprobs: Any, token_ids: Any) -> list[float] | None:
    if not logprobs:
        return None
    return [float(entry[token].logprob) for entry, token in zip(logprobs, token_ids, strict=True)]
