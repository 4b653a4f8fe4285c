"""Our engine options as vLLM's arguments and environment, for the engines of `eagle3 bench`."""

import os
from typing import Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import EngineOptions

# Set by the bench itself or by options of their own, or would make its figures mean something else. All of them are
# refused of the producer's engine as well (extract/engine.py): a fit does not find out at its end. `seed` is not among
# them: the bench is greedy.
RESERVED = (
    "model",
    "tokenizer",
    "trust_remote_code",
    "speculative_config",
    "additional_config",
    "enable_prefix_caching",
    "disable_log_stats",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
)


def check_reserved(options: EngineOptions) -> None:
    """Refuse extra arguments that the bench sets itself.

    Raises:
        ConfigError: one of them is set.
    """
    for name, value in options.extra.items():
        if name in RESERVED:
            raise ConfigError(f"data.engine.extra.{name}", value, "the bench sets it itself", "Remove it.")


def engine_arguments(options: EngineOptions, *, on_cpu: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """Keyword arguments of `vllm.LLM`, and environment variables, both without model and draft.

    Args:
        options: the engine's options; `check_reserved` has taken them.
        on_cpu: whether the engine runs on the CPU, where vLLM neither compiles nor uses CUDA graphs here.
    """
    arguments: dict[str, Any] = {
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "dtype": options.dtype,
        "enforce_eager": options.enforce_eager or on_cpu,
        "enable_prefix_caching": False,  # every pass must prefill, not only the first
        "disable_log_stats": False,  # the counters of speculative decoding are statistics
        "seed": 0,
    }
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    environment = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if on_cpu:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(options.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # One process instead of two: the engine starts in 9 s instead of 32 (2 cores, SmolLM2-135M).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # Beside other programs, a thread that waits for the others must let go of its core.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        if options.cpu_threads is not None:
            environment["OMP_NUM_THREADS"] = str(options.cpu_threads)
    else:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
    return arguments | options.extra, environment
