"""The options of a run as the plan reads them: typed, and where it runs."""

from dataclasses import dataclass, field
from typing import Any

from jsonargparse import Namespace

from eagle3_lightning.checks import COUNT, POSITIVE, Range, check_number, check_numbers
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    DraftOptions,
    EngineOptions,
    LossOptions,
    OptimOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    SourceOptions,
    SynthesisOptions,
    TargetOptions,
)
from eagle3_lightning.plan.check import check_callbacks, check_trainer, on_gpus, read_gpus
from eagle3_lightning.trainer_checks import check_fit

# Lightning's names of the precisions that a fit takes, and the bytes of a master and of what is computed.
_PRECISIONS = {
    "32-true": (4, 4),
    "32": (4, 4),
    "None": (4, 4),
    "64-true": (8, 8),
    "64": (8, 8),
    "bf16-mixed": (4, 2),
    "bf16": (4, 2),
}

SEED = Range(0, 2**32 - 1)  # NumPy's, which every fit seeds


@dataclass(frozen=True)
class PlanOptions:
    """What the plan cannot know from the options of a run.

    Attributes:
        gpu_memory_gib: memory of each GPU as torch sees it; the default is an H200's.
        matrix_tflops: rate of a large bf16 matrix product; None is an H200's on a GPU, and no estimate on a CPU.
        bandwidth_gb_s: memory bandwidth; None likewise.
        host_memory_gib: memory of the host; None does not check it for a GPU run, and is what is free here on a CPU.
        prompt_tokens: mean length of a prompt (of a whole conversation in prefill mode); None assumes one.
        answer_tokens: mean length of an answer; None is half of data.sampling.max_new_tokens.
    """

    gpu_memory_gib: float = 139.0
    matrix_tflops: float | None = None
    bandwidth_gb_s: float | None = None
    host_memory_gib: float | None = None
    prompt_tokens: int | None = None
    answer_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        rates = dict.fromkeys(("gpu_memory_gib", "matrix_tflops", "bandwidth_gb_s", "host_memory_gib"), POSITIVE)
        check_numbers("plan", self, **rates, prompt_tokens=COUNT, answer_tokens=COUNT)
        if (self.matrix_tflops is None) != (self.bandwidth_gb_s is None):
            raise ConfigError(
                "plan.matrix_tflops",
                self.matrix_tflops,
                "a card's matrix rate and its bandwidth go together",
                "Give both --plan.matrix_tflops and --plan.bandwidth_gb_s, or neither.",
            )


@dataclass
class Run:
    """The options of a run, typed, and where it runs."""

    target: TargetOptions
    draft: DraftOptions
    loss: LossOptions
    optim: OptimOptions
    sampling: SamplingOptions
    engine: EngineOptions
    queue: QueueOptions
    batch: BatchOptions
    cache: CacheOptions
    prompts: PromptOptions | None
    on_cpu: bool
    trainer_gpus: list[int]
    ranks: int
    master_bytes: int
    compute_bytes: int
    accumulate: int
    max_steps: int
    vllm_version: str | None
    init_from: str | None
    notes: list[str] = field(default_factory=list)


def read_run(config: Any) -> Run:
    """What `eagle3 fit` was asked for.

    Args:
        config: the parsed options of the command.

    Raises:
        ConfigError: options that fit refuses, whatever the target; or a precision that the plan cannot read.
        OptionsError: likewise, in Lightning's words.
    """
    data, model, trainer = config.data, config.model, config.trainer
    check_fit(trainer)
    notes: list[str] = []
    optim = _typed(OptimOptions, model.optim)
    gpus = read_gpus(trainer.devices, notes) if on_gpus(trainer.accelerator, notes) else []
    ranks = check_trainer(trainer, optim, gpus)
    check_callbacks(config)
    check_number("seed_everything", config.seed_everything, SEED)
    if str(trainer.precision) not in _PRECISIONS:
        raise ConfigError(
            "trainer.precision",
            trainer.precision,
            "the optimizer needs float32 weights",
            "Use one of 32-true, 64-true, bf16-mixed.",
        )
    master, compute = _PRECISIONS[str(trainer.precision)]
    return Run(
        target=_typed(TargetOptions, config.target),
        draft=_typed(DraftOptions, model.draft),
        loss=_typed(LossOptions, model.loss),
        optim=optim,
        sampling=_typed(SamplingOptions, data.sampling),
        engine=_typed(EngineOptions, data.engine),
        queue=_typed(QueueOptions, data.queue),
        batch=_typed(BatchOptions, data.batch),
        cache=_typed(CacheOptions, data.cache),
        prompts=_prompts(data.prompts),
        on_cpu=not gpus,
        trainer_gpus=gpus,
        ranks=ranks,
        master_bytes=master,
        compute_bytes=compute,
        accumulate=int(trainer.accumulate_grad_batches),
        max_steps=int(trainer.max_steps),
        vllm_version=config.export.vllm_version,
        init_from=model.init_from,
        notes=notes,
    )


def _typed(kind: Any, options: Any) -> Any:
    return kind() if options is None else kind(**_plain(options))


def _prompts(options: Any) -> PromptOptions | None:
    """With its nested groups typed, which is when they are checked."""
    if options is None:
        return None
    given = _plain(options)
    synthesis = {"synthesis": SynthesisOptions(**given["synthesis"])} if given.get("synthesis") else {}
    sources = {name: _sources(given[name]) for name in ("train", "val") if given.get(name) is not None}
    return PromptOptions(**{**given, **synthesis, **sources})


def _sources(given: Any) -> Any:
    if isinstance(given, dict):
        return SourceOptions(**given)
    if not isinstance(given, list):
        return given
    return [SourceOptions(**source) if isinstance(source, dict) else source for source in given]


def _plain(options: Any) -> Any:
    """Parsed options as dicts, those in lists as well."""
    if isinstance(options, Namespace):
        return {name: _plain(value) for name, value in vars(options).items()}
    return [_plain(entry) for entry in options] if isinstance(options, list) else options
