"""Logs how fast a run is and what it waits for: `perf/`, `queue/` and `producer/` of docs/metrics.md."""

import statistics
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from eagle3_lightning.checks import POSITIVE, check_number
from eagle3_lightning.datamodule import DataStats
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.plan.flops import Work, flops_done

_PROBE_SIZE, _PROBE_PRODUCTS, _PROBE_WARM = 8192, 10, 3
_COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "64-true": torch.float64}


class ThroughputCallback(Callback):
    """Rates over the steps since the last log line, at every logged step."""

    def __init__(self, peak_tflops: float | None = None) -> None:
        """Say what the device can do.

        Args:
            peak_tflops: matrix rate of one device, of which `perf/mfu` is a share; None measures it on CUDA at the
                start, and logs no `perf/mfu` on the CPU.

        Raises:
            ConfigError: a rate that makes no sense.
        """
        check_number("throughput.peak_tflops", peak_tflops, POSITIVE)
        self._peak_flops = None if peak_tflops is None else peak_tflops * 1e12
        self._logged_step, self._tokens, self._flops, self._last_s = 0, 0.0, 0.0, 0.0
        self._last: DataStats | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Measure the matrix rate while nothing else uses the GPU: vLLM is being imported, or has no request yet."""
        device = trainer.strategy.root_device
        if stage == "fit" and self._peak_flops is None and device.type == "cuda":
            dtype = _COMPUTE_DTYPES.get(str(trainer.precision), torch.float32)
            self._peak_flops = matrix_rate(device, dtype)
            name = str(dtype).removeprefix("torch.")
            rank_zero_info(f"matrix rate: {self._peak_flops / 1e12:,.0f} TFLOP/s in {name} (perf/mfu is a share of it)")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock when calibration is over."""
        self._logged_step, self._tokens, self._flops = trainer.global_step, _tokens(pl_module), 0.0
        self._last_s, self._last = time.monotonic(), _stats(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log, if the step is one that is logged."""
        self._count(pl_module, batch)
        step = trainer.global_step
        if step == self._logged_step or step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        tokens, now = _tokens(pl_module), _stats(trainer)
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._last_s, 1e-9)
        metrics = {"perf/tokens_per_s": (tokens - self._tokens) / elapsed_s}
        if self._peak_flops is not None:
            metrics["perf/mfu"] = self._all_flops(trainer) / (elapsed_s * self._peak_flops * trainer.world_size)
        if now is not None and self._last is not None:
            metrics |= rates(self._last, now, elapsed_s)
        pl_module.log_dict(metrics, rank_zero_only=True)
        self._logged_step, self._tokens, self._flops, self._last_s, self._last = step, tokens, 0.0, now_s, now

    def _count(self, module: LightningModule, batch: Any) -> None:
        plan = getattr(batch, "plan", None)
        if plan is not None and self._peak_flops is not None:
            assert isinstance(module, Eagle3Module)
            self._flops += flops_done(module.draft.config, module.loss.ttt_steps, Work.of_plan(plan))

    def _all_flops(self, trainer: Trainer) -> float:
        """Of all ranks since the last logged step; every rank gets here at the same step."""
        if trainer.world_size == 1:
            return self._flops
        mine = torch.tensor(self._flops, dtype=torch.float64, device=trainer.strategy.root_device)
        return float(trainer.strategy.reduce(mine, reduce_op="sum"))


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product on a CUDA device, median of a few; scripts/bench_train.py measures it so."""
    a, b = (torch.randn(_PROBE_SIZE, _PROBE_SIZE, dtype=dtype, device=device) for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_PROBE_WARM + _PROBE_PRODUCTS + 1)]
    with torch.cuda.device(device):
        for event in events:
            event.record()
            out = a @ b
        torch.cuda.synchronize(device)
        del a, b, out
        torch.cuda.empty_cache()  # vLLM is about to look how much is free
    milliseconds = [x.elapsed_time(y) for x, y in zip(events[_PROBE_WARM:-1], events[_PROBE_WARM + 1 :], strict=True)]
    return 2.0 * _PROBE_SIZE**3 / (statistics.median(milliseconds) / 1e3)


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
        "queue/depth_bytes": float(after.queue.depth_bytes),
        "queue/batches_ready": float(after.rounds_ready),
        "queue/dropped": float(sum(after.queue.dropped.values())),
        **{f"queue/dropped_{reason}": float(n) for reason, n in after.queue.dropped.items()},
        "queue/spilled": float(after.queue.spilled),
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
    return datamodule.stats() if datamodule is not None and datamodule.is_open else None
