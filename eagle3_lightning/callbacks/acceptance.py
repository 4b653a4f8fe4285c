"""Serves the draft in vLLM while it trains, and logs the acceptance that counts beside the simulated one."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from eagle3_lightning.callbacks.export import BEST_DIR, EXPORT_DIR, SUMMARY_FILE, ExportCallback
from eagle3_lightning.checks import COUNT, NOT_NEGATIVE, POSITIVE_SHARE, check_number
from eagle3_lightning.errors import ConfigError, Eagle3Error
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import EngineOptions
from eagle3_lightning.ranks import rank_zero_first
from eagle3_lightning.serve.bench import BenchOptions, measure
from eagle3_lightning.serve.engine_args import check_reserved
from eagle3_lightning.serve.results import BenchReport, DraftFigures
from eagle3_lightning.serve.table import never_accepted
from eagle3_lightning.summary import served_figures, update_summary

_NUM_ENGINES = 2  # with the draft, and the target alone


class AcceptanceCallback(Callback):
    """Every so many steps: export, bench on held-out prompts, log `serve/`, keep the best draft in `best/`.

    The bench's engines run beside the producer's, one after the other, in processes of their own: the training waits
    for them, and on a GPU they need memory beside the producer's and the trainer's.
    """

    def __init__(
        self,
        prompts: Path | None = None,
        every_n_steps: int | None = None,
        at_end: bool = True,
        num_speculative_tokens: int | None = None,
        max_new_tokens: int = 128,
        max_prompts: int = 40,
        concurrency: int = 16,
        gpu_memory_utilization: float = 0.2,
    ) -> None:
        """Say on what and how often.

        Args:
            prompts: file of held-out prompts; None turns the callback off.
            every_n_steps: optimizer steps between two measurements; None or 0 measures at the end alone.
            at_end: measure when the training ends.
            num_speculative_tokens: tokens proposed in a round; None is the export's own number.
            max_new_tokens: longest answer.
            max_prompts: run only the first so many prompts.
            concurrency: requests in flight.
            gpu_memory_utilization: share of the GPU's memory for each engine.

        Raises:
            ConfigError: a number that makes no sense.
        """
        for name, value, allowed in (
            ("every_n_steps", every_n_steps, NOT_NEGATIVE),
            ("num_speculative_tokens", num_speculative_tokens, COUNT),
            ("max_new_tokens", max_new_tokens, COUNT),
            ("max_prompts", max_prompts, COUNT),
            ("concurrency", concurrency, COUNT),
            ("gpu_memory_utilization", gpu_memory_utilization, POSITIVE_SHARE),
        ):
            check_number(f"acceptance.{name}", value, allowed)
        self.prompts, self.every_n_steps, self.at_end = prompts, every_n_steps, at_end
        self.num_speculative_tokens, self.max_new_tokens = num_speculative_tokens, max_new_tokens
        self.max_prompts, self.concurrency = max_prompts, concurrency
        self.gpu_memory_utilization = gpu_memory_utilization
        self.best = 0.0
        self._measured_step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a missing prompt file before the training, not in the middle of it."""
        if self.prompts is not None and not self.prompts.is_file():
            raise ConfigError(
                "acceptance.prompts", str(self.prompts), "there is no such file", "Name held-out prompts."
            )

    def check_engine(self, engine: EngineOptions) -> None:
        """Refuse what the bench will not run the producer's options with; stored states leave them unchecked.

        Args:
            engine: of the data module, which a trainer does not know before it begins.

        Raises:
            ConfigError: an engine argument that the bench sets itself.
        """
        if self.prompts is not None:
            check_reserved(engine)

    def state_dict(self) -> dict[str, Any]:
        """The best served acceptance length so far, so that a resumed run does not lose its best draft."""
        return {"best": self.best, "measured_step": self._measured_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.best = state_dict["best"]
        self._measured_step = state_dict.get("measured_step", 0)  # else its first micro-batch would measure it again

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Measure if it is time; every rank waits for rank 0."""
        step = trainer.global_step
        if self.every_n_steps and step != self._measured_step and step % self.every_n_steps == 0:
            self._measure(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measure what the training ended with."""
        if self.at_end and trainer.global_step != self._measured_step:
            self._measure(trainer, pl_module)

    def _measure(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measured_step = trainer.global_step
        if self.prompts is None:
            return
        engine = _engine(trainer)
        longest_s = _NUM_ENGINES * (engine.start_timeout_s + self.max_prompts * engine.step_timeout_s)
        with rank_zero_first(trainer, "the bench", longest_s) as here:
            if here:
                self._measure_here(trainer, pl_module, self.prompts)

    def _measure_here(self, trainer: Trainer, pl_module: LightningModule, prompts: Path) -> None:
        """On rank 0. A bench that fails is reported and does not end the training."""
        exporter = next(callback for callback in trainer.callbacks if isinstance(callback, ExportCallback))  # type: ignore[attr-defined]
        export = exporter.export(trainer, pl_module)
        assert export is not None, "rank 0 exports"
        try:
            report = measure(self._bench_options(trainer, pl_module, export.path, prompts))
            self._record(trainer, exporter.directory(trainer), report)
        except (Eagle3Error, OSError) as error:
            print(f"the draft of step {trainer.global_step} could not be served: {error}", flush=True)

    def _bench_options(self, trainer: Trainer, pl_module: LightningModule, draft: Path, prompts: Path) -> BenchOptions:
        """The target as the producer runs it, with prompts rendered as training renders them."""
        assert isinstance(pl_module, Eagle3Module)
        data = getattr(trainer, "datamodule", None)
        return BenchOptions(
            draft,
            [prompts],
            target=str(pl_module.target_info.path),
            num_speculative_tokens=[] if self.num_speculative_tokens is None else [self.num_speculative_tokens],
            concurrency=[self.concurrency],
            max_new_tokens=self.max_new_tokens,
            check_rounding=False,  # it would be as much work again as the target alone
            max_prompts=[] if self.max_prompts is None else [self.max_prompts],
            chat_template_kwargs={} if data is None else data.prompts.chat_template_kwargs,
            trust_remote_code=pl_module.target_options.trust_remote_code,
            engine=replace(_engine(trainer), gpu_memory_utilization=self.gpu_memory_utilization),
        )

    def _record(self, trainer: Trainer, run_dir: Path, report: BenchReport) -> None:
        """Log the figures, put them into the summary, and keep the draft if it is the best one so far."""
        (figures,) = report.figures
        for depth in report.never_accepted:
            print(f"the draft of step {trainer.global_step}: {never_accepted(report, depth)}", flush=True)
        for logger in trainer.loggers:
            logger.log_metrics(serve_metrics(figures, report), step=trainer.global_step)
        update_summary(run_dir / SUMMARY_FILE, served_figures(report))
        if figures.acceptance_length > self.best:
            self.best = figures.acceptance_length
            keep(run_dir / EXPORT_DIR, run_dir / BEST_DIR)


def _engine(trainer: Trainer) -> EngineOptions:
    data = getattr(trainer, "datamodule", None)
    return EngineOptions() if data is None else data.engine


def serve_metrics(figures: DraftFigures, report: BenchReport) -> dict[str, float]:
    """What is logged of a bench, as docs/metrics.md describes it."""
    positions = {f"serve/accepted_{k}": share for k, share in enumerate(figures.acceptance_per_position, start=1)}
    return {
        "serve/acceptance_length": figures.acceptance_length,
        "serve/tokens_per_s": figures.tokens_per_s,
        "serve/plain_tokens_per_s": figures.plain_tokens_per_s,
        "serve/identical_share": figures.identical / report.num_prompts,
        "serve/real_differences": float(figures.real_differences),
        **positions,
    }


def keep(export: Path, best: Path) -> None:
    """Copy an export over the best one before; whatever goes wrong, a whole one is left."""
    partial, aside = (best.with_name(f".{best.name}.{what}") for what in ("partial", "previous"))
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        shutil.copytree(export, partial)
        if best.exists():
            best.rename(aside)
        partial.rename(best)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        if aside.exists() and not best.exists():
            aside.rename(best)
        raise
    shutil.rmtree(aside, ignore_errors=True)
