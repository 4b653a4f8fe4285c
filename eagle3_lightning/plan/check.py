"""What `eagle3 fit` refuses before it starts vLLM, by fit's own checks: all that need no prompts, card or directory."""

import datetime
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import StrategyRegistry

from eagle3_lightning.callbacks.acceptance import AcceptanceCallback
from eagle3_lightning.callbacks.export import ExportCallback
from eagle3_lightning.callbacks.preview import PreviewCallback
from eagle3_lightning.callbacks.progress import ProgressCallback
from eagle3_lightning.callbacks.throughput import ThroughputCallback
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.schema import check_servable
from eagle3_lightning.extract.engine import check_capacity, check_extra
from eagle3_lightning.optim import run_clock, schedule
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    OptimOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
)
from eagle3_lightning.prompts.setup import TRAIN, check_lengths
from eagle3_lightning.prompts.sources import as_sources
from eagle3_lightning.prompts.states import check_nothing_is_made
from eagle3_lightning.stream.foreign import holds_states
from eagle3_lightning.target import TargetInfo
from eagle3_lightning.trainer_cli import in_one_line

_CALLBACKS = {
    "acceptance": AcceptanceCallback,
    "export": ExportCallback,
    "throughput": ThroughputCallback,
    "progress": ProgressCallback,
    "preview": PreviewCallback,
}
# Of the trainer's options: what opens files or changes torch for the whole process; precision is the plan's own check.
_NOT_TAKEN = (
    "precision", "logger", "callbacks", "plugins", "profiler", "benchmark", "deterministic", "detect_anomaly",
    "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "model_registry",
)  # fmt: skip
_PLAIN = (str, int, float, list, dict, Path, datetime.timedelta)


def check_callbacks(config: Any) -> None:
    """Refuse numbers that the callbacks refuse.

    Raises:
        ConfigError: one of them.
    """
    for name, callback in _CALLBACKS.items():
        if (options := config.get(name)) is not None:
            callback(**options.as_dict())


def check_trainer(trainer: Any, optim: OptimOptions, gpus: list[int]) -> int:
    """Have Lightning refuse the trainer's options, and the schedule what it cannot do with them.

    Args:
        trainer: its options, parsed.
        optim: with the schedule.
        gpus: that train. They are not those of this machine, so the CPU stands in for them; empty is a CPU run.

    Returns:
        The number of ranks.

    Raises:
        OptionsError: Lightning refuses them.
        ConfigError: the schedule does, or the accelerator is neither a CPU nor a GPU.
    """
    given = trainer.as_dict() if hasattr(trainer, "as_dict") else dict(trainer)
    taken: dict[str, Any] = {
        name: value
        for name, value in given.items()
        if name not in _NOT_TAKEN and isinstance(value, _PLAIN) and not _is_class(value)
    }
    if gpus:
        taken |= {"accelerator": "cpu", "devices": len(gpus)}
        strategy = taken.get("strategy", "auto")
        if strategy in StrategyRegistry.available_strategies() and not strategy.startswith("ddp"):
            taken["strategy"] = "auto"  # one that Lightning knows, and may refuse on a CPU
    with in_one_line(), _quiet():
        made = Trainer(
            **taken, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
        )
    if not isinstance(made.accelerator, CPUAccelerator):
        raise ConfigError("trainer.accelerator", trainer.accelerator, "a draft is trained on a CPU or on CUDA GPUs",
                          "Use cpu, gpu or auto.")  # fmt: skip
    schedule(optim, made.max_steps, run_clock(made))
    return made.num_devices


def check_data(
    info: TargetInfo,
    prompts: PromptOptions | None,
    sampling: SamplingOptions,
    engine: EngineOptions,
    queue: QueueOptions,
    batch: BatchOptions,
    cache: CacheOptions,
) -> None:
    """Refuse lengths and engine arguments that fit refuses; stored states need no vLLM, so nothing of it is checked.

    Raises:
        ConfigError: one of them.
    """
    sources = [] if prompts is None else as_sources(prompts.train, TRAIN)
    if any(holds_states(Path(source.path).expanduser()) for source in sources):
        check_nothing_is_made(sampling, cache)
        return
    check_lengths(info, engine, sampling)
    check_extra(engine.extra)
    check_capacity(engine, queue)
    if sampling.mode == "generate" and sampling.max_new_tokens >= longest_sample(engine, batch):
        raise ConfigError(
            "data.batch.pack_tokens",
            batch.pack_tokens,
            f"no prompt fits beside an answer of data.sampling.max_new_tokens = {sampling.max_new_tokens}",
            "Raise it, or lower max_new_tokens.",
        )


def check_export(draft: DraftConfig, vllm_version: str | None) -> None:
    """Refuse a draft that the vLLM which will serve it cannot serve.

    Args:
        draft: its sizes and norms.
        vllm_version: as given; None is the one that is installed where the run will be, of which nothing is known.

    Raises:
        ConfigError: it cannot, or there is no such version.
    """
    if vllm_version is None:
        return
    try:
        check_servable(draft, vllm_version)
    except ConfigError as error:
        option = "export.vllm_version" if error.option == "--vllm-version" else error.option
        raise ConfigError(option, error.value, error.problem, error.remedy) from error


def longest_sample(engine: EngineOptions, batch: BatchOptions) -> int:
    """Tokens of prompt and answer together, as `RequestStream` counts: the first and the last take no slot."""
    return min(engine.max_model_len, batch.pack_tokens + 2)


def on_gpus(accelerator: Any, notes: list[str]) -> bool:
    """Whether the trainer is on GPUs and not on the CPU.

    Args:
        accelerator: as given.
        notes: told what `auto` means here.
    """
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        notes.append(f"trainer.accelerator is auto: planned for {'a GPU' if accelerator == 'gpu' else 'the CPU'}")
    return accelerator in ("gpu", "cuda")


def read_gpus(devices: Any, notes: list[str]) -> list[int]:
    """The trainer's GPUs.

    Args:
        devices: a number, a list, or text with one of them, as Lightning takes it.
        notes: told what `auto` means here.

    Raises:
        ConfigError: no GPU, or one twice.
    """
    remedy = "Give a number of GPUs, or a list of them."
    with suppress(TypeError, ValueError):
        devices = int(devices)
    if devices in ("auto", -1):
        notes.append(f"trainer.devices is {devices}: planned for one GPU; with more, every one that is visible trains")
        return [0]
    if isinstance(devices, int):
        gpus = list(range(devices))
    else:
        words = devices if isinstance(devices, list) else str(devices).strip("[] ,").split(",")
        try:
            gpus = [int(word) for word in words if word != ""]
        except (TypeError, ValueError):
            raise ConfigError("trainer.devices", devices, "it names no GPUs", remedy) from None
    if not gpus or min(gpus) < 0:
        raise ConfigError("trainer.devices", devices, "no GPU would train", remedy)
    if len(set(gpus)) < len(gpus):
        raise ConfigError("trainer.devices", devices, "a GPU is named twice", "Name each GPU once.")
    return gpus


def _is_class(value: Any) -> bool:
    return isinstance(value, dict) and "class_path" in value


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Lightning says of a trainer that it makes: this one trains nothing."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
