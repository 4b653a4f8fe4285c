"""Says at a run's end what became of its samples: drops, restarts of vLLM, waits; as a line and in summary.json."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from eagle3_lightning.datamodule import DataStats, HiddenStateDataModule
from eagle3_lightning.summary import SUMMARY_FILE, update_summary


class DataSummaryCallback(Callback):
    """A run that fails prints the line too; summary.json is written by one that ends well."""

    def __init__(self) -> None:
        """Nothing has begun."""
        self._start_s: float | None = None
        self._step = 0
        self._depths: list[tuple[int, int]] = []  # tokens and bytes in the queue, at the logged steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock when calibration is over."""
        self._start_s, self._step = time.monotonic(), trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look how full the queue is, at the steps that are logged."""
        if trainer.global_step == self._step or trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._step = trainer.global_step
        data = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(data, HiddenStateDataModule) and data.is_open:
            queue = data.stats().queue
            self._depths.append((queue.depth_tokens, queue.depth_bytes))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum up while the data is still open."""
        figures = self._sum_up(trainer)
        if figures is not None and trainer.is_global_zero:
            update_summary(Path(trainer.default_root_dir) / SUMMARY_FILE, figures)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The line alone."""
        self._sum_up(trainer)

    def _sum_up(self, trainer: Trainer) -> dict[str, Any] | None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if self._start_s is None or not isinstance(data, HiddenStateDataModule) or not data.is_open:
            return None
        figures = totals(data.stats(), time.monotonic() - self._start_s, self._depths)
        rank_zero_info(totals_line(figures))
        return figures


def totals(stats: DataStats, elapsed_s: float, depths: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What became of the samples of a whole run, for summary.json.

    Args:
        stats: counters at the end.
        elapsed_s: seconds of training.
        depths: tokens and bytes in the queue, at several moments.
    """
    queue = stats.queue
    busy_s = max(queue.producer.busy_s, 1e-9)
    mean_depth = [round(statistics.fmean(each)) for each in zip(*depths, strict=True)] or [0, 0]
    return {
        "samples_taken": queue.taken,
        "samples_dropped": {str(reason): n for reason, n in queue.dropped.items()},
        "first_dropped": {str(reason): names for reason, names in queue.dropped_names.items()},
        "samples_cut": queue.cut,
        "mean_depth_tokens": mean_depth[0],
        "mean_depth_bytes": mean_depth[1],
        "samples_spilled": queue.spilled,
        "producer_restarts": queue.restarts,
        "trainer_wait_s": round(stats.wait_s, 3),
        "trainer_wait_share": round(stats.wait_s / max(elapsed_s, 1e-9), 4),
        "producer_prefill_tokens": queue.producer.prefill_tokens,
        "producer_decode_tokens": queue.producer.decode_tokens,
        "producer_prefill_tokens_per_s": round(queue.producer.prefill_tokens / busy_s, 1),
        "producer_decode_tokens_per_s": round(queue.producer.decode_tokens / busy_s, 1),
        "producer_busy_s": round(queue.producer.busy_s, 3),
        "producer_starved_s": round(queue.producer.starved_s, 3),
    }


def totals_line(figures: dict[str, Any]) -> str:
    """The same for a reader, without the names."""
    dropped = figures["samples_dropped"]
    reasons = f" ({', '.join(f'{reason} {n}' for reason, n in dropped.items())})" if dropped else ""
    return (
        f"{figures['samples_taken']} samples taken, {sum(dropped.values())} dropped{reasons}, {figures['samples_cut']} "
        f"cut by the length limit; {figures['producer_restarts']} restarts of vLLM; the trainer waited "
        f"{figures['trainer_wait_s']:.1f} s ({figures['trainer_wait_share']:.1%}) for data, vLLM "
        f"{figures['producer_starved_s']:.1f} s for room in the queue; vLLM ran {figures['producer_prefill_tokens']:,} "
        f"prompt and made {figures['producer_decode_tokens']:,} answer tokens, "
        f"{figures['producer_prefill_tokens_per_s']:,.0f} and {figures['producer_decode_tokens_per_s']:,.0f} a second "
        f"of its work; {figures['mean_depth_tokens']:,} tokens ({figures['mean_depth_bytes'] / 2**20:,.1f} MiB) were "
        "queued on average"
    )
