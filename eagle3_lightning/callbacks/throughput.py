"""Logs how fast a run is and what it waits for: `perf/`, `queue/` and `producer/` of docs/metrics.md."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from eagle3_lightning.datamodule import DataStats
from eagle3_lightning.module import Eagle3Module


class ThroughputCallback(Callback):
    """Rates over the steps since the last log line, at every logged step."""

    def __init__(self) -> None:
        self._logged_step, self._tokens, self._last_s = 0, 0.0, 0.0
        self._last: DataStats | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock when calibration is over."""
        self._logged_step, self._tokens = trainer.global_step, _tokens(pl_module)
        self._last_s, self._last = time.monotonic(), _stats(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if the step is one that is logged."""
        step = trainer.global_step
        if step == self._logged_step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        tokens, now = _tokens(pl_module), _stats(trainer)
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._last_s, 1e-9)
        metrics = {"perf/tokens_per_s": (tokens - self._tokens) / elapsed_s}
        if now is not None and self._last is not None:
            metrics |= rates(self._last, now, elapsed_s)
        pl_module.log_dict(metrics, rank_zero_only=True)
        self._logged_step, self._tokens, self._last_s, self._last = step, tokens, now_s, now


def rates(before: DataStats, after: DataStats, elapsed_s: float) -> dict[str, float]:
    """What happened between two moments, for the log.

    Args:
        before: counters at the first moment.
        after: counters at the second.
        elapsed_s: seconds between them.
    """
    old, new = before.queue.producer, after.queue.producer
    return {
        "perf/wait_share": (after.wait_s - before.wait_s) / elapsed_s,
        "queue/depth_samples": float(after.queue.depth_samples),
        "queue/depth_tokens": float(after.queue.depth_tokens),
        "queue/batches_ready": float(after.rounds_ready),
        "queue/dropped": float(sum(after.queue.dropped.values())),
        "queue/cut_share": after.queue.cut / max(1, after.queue.taken),
        "queue/restarts": float(after.queue.restarts),
        "producer/prefill_tokens_per_s": max(0, new.prefill_tokens - old.prefill_tokens) / elapsed_s,
        "producer/decode_tokens_per_s": max(0, new.decode_tokens - old.decode_tokens) / elapsed_s,
        "producer/busy_share": max(0.0, new.busy_s - old.busy_s) / elapsed_s,
        "producer/starved_share": max(0.0, new.starved_s - old.starved_s) / elapsed_s,
        "producer/running": float(new.running),
    }


def _tokens(module: LightningModule) -> float:
    """Slots that all ranks have trained on; the module reads them at the same steps, so this waits for nothing new."""
    assert isinstance(module, Eagle3Module)
    return float(module.totals[0])


def _stats(trainer: Trainer) -> DataStats | None:
    datamodule = getattr(trainer, "datamodule", None)
    return datamodule.stats() if datamodule is not None else None
