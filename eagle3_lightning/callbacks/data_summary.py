"""Says at a run's end what became of its samples: drops, restarts of vLLM, waits; as a line and in summary.json."""

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from eagle3_lightning.datamodule import DataStats, HiddenStateDataModule
from eagle3_lightning.stream.queue import NAMES_PER_REASON
from eagle3_lightning.summary import SUMMARY_FILE, update_summary


@dataclass
class RunSums:
    """Sums over a run, or over one start of it; those of all starts are their sum.

    Attributes:
        elapsed_s: seconds of training.
        wait_s: of these, the trainer waited for data.
        taken: samples handed to the trainer.
        cut: of these, the length limit ended the answer.
        spilled: samples moved out of the arena early.
        restarts: of vLLM while the run went on.
        prefill_tokens: that vLLM ran.
        decode_tokens: that it made.
        busy_s: seconds with at least one request in it.
        starved_s: seconds in which it waited for room in the queue.
        depths: how often the queue was looked at.
        depth_tokens: in the queue then, summed.
        depth_bytes: their bytes.
        dropped: samples by reason.
        dropped_names: the first few of each reason.
    """

    elapsed_s: float = 0.0
    wait_s: float = 0.0
    taken: int = 0
    cut: int = 0
    spilled: int = 0
    restarts: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0
    starved_s: float = 0.0
    depths: int = 0
    depth_tokens: int = 0
    depth_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    dropped_names: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, stats: DataStats, elapsed_s: float) -> "RunSums":
        """What one start has done, as its counters say; the depth of the queue is not among them."""
        queue, producer = stats.queue, stats.queue.producer
        return cls(
            elapsed_s, stats.wait_s, queue.taken, queue.cut, queue.spilled, queue.restarts, producer.prefill_tokens,
            producer.decode_tokens, producer.busy_s, producer.starved_s,
            dropped={str(reason): n for reason, n in queue.dropped.items()},
            dropped_names={str(reason): list(names) for reason, names in queue.dropped_names.items()},
        )  # fmt: skip

    def __add__(self, later: "RunSums") -> "RunSums":
        """Of both; of the names, the earlier ones come first."""
        mine, theirs = asdict(self), asdict(later)
        both = {name: mine[name] + theirs[name] for name in mine if not name.startswith("dropped")}
        reasons = dict.fromkeys([*self.dropped, *later.dropped])
        both["dropped"] = {r: self.dropped.get(r, 0) + later.dropped.get(r, 0) for r in reasons}
        both["dropped_names"] = {
            r: [*self.dropped_names.get(r, []), *later.dropped_names.get(r, [])][:NAMES_PER_REASON] for r in reasons
        }
        return RunSums(**both)

    def look(self, tokens: int, size_bytes: int) -> None:
        """Add one look at the queue."""
        self.depths, self.depth_tokens = self.depths + 1, self.depth_tokens + tokens
        self.depth_bytes += size_bytes


class DataSummaryCallback(Callback):
    """A run that fails prints the line too; summary.json is written by one that ends well.

    The figures are of the whole run: a checkpoint holds those up to it, and a resumed run adds its own.
    """

    def __init__(self) -> None:
        """Nothing has begun."""
        self._start_s: float | None = None
        self._step = 0
        self._earlier, self._depths = RunSums(), RunSums()  # of the starts before; looks at the queue in this one
        self._data: HiddenStateDataModule | None = None

    def state_dict(self) -> dict[str, Any]:
        """The sums so far, of all starts."""
        return asdict(self._sums() or self._earlier)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._earlier = RunSums(**state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock when calibration is over."""
        self._start_s, self._step = time.monotonic(), trainer.global_step
        data = trainer.datamodule  # type: ignore[attr-defined]
        self._data = data if isinstance(data, HiddenStateDataModule) else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look how full the queue is, at the steps that are logged."""
        if trainer.global_step == self._step or trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._step = trainer.global_step
        if self._data is not None and self._data.is_open:
            queue = self._data.stats().queue
            self._depths.look(queue.depth_tokens, queue.depth_bytes)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sum up while the data is still open."""
        figures = self._sum_up()
        if figures is not None and trainer.is_global_zero:
            update_summary(Path(trainer.default_root_dir) / SUMMARY_FILE, figures)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The line alone."""
        self._sum_up()

    def _sums(self) -> RunSums | None:
        """Of all starts; None unless this one trains."""
        if self._start_s is None or self._data is None or not self._data.is_open:
            return None
        now = RunSums.of(self._data.stats(), time.monotonic() - self._start_s)
        return self._earlier + now + self._depths

    def _sum_up(self) -> dict[str, Any] | None:
        if (sums := self._sums()) is None:
            return None
        figures = totals(sums)
        rank_zero_info(totals_line(figures))
        return figures


def totals(sums: RunSums) -> dict[str, Any]:
    """What became of the samples of a whole run, for summary.json."""
    busy_s = max(sums.busy_s, 1e-9)
    looks = sums.depths or None
    return {
        "samples_taken": sums.taken,
        "samples_dropped": sums.dropped,
        "first_dropped": sums.dropped_names,
        "samples_cut": sums.cut,
        "mean_depth_tokens": looks and round(sums.depth_tokens / looks),  # null where nobody looked
        "mean_depth_bytes": looks and round(sums.depth_bytes / looks),
        "samples_spilled": sums.spilled,
        "producer_restarts": sums.restarts,
        "trainer_wait_s": round(sums.wait_s, 3),
        "trainer_wait_share": round(sums.wait_s / max(sums.elapsed_s, 1e-9), 4),
        "producer_prefill_tokens": sums.prefill_tokens,
        "producer_decode_tokens": sums.decode_tokens,
        "producer_prefill_tokens_per_s": round(sums.prefill_tokens / busy_s, 1),
        "producer_decode_tokens_per_s": round(sums.decode_tokens / busy_s, 1),
        "producer_busy_s": round(sums.busy_s, 3),
        "producer_starved_s": round(sums.starved_s, 3),
    }


def totals_line(figures: dict[str, Any]) -> str:
    """The same for a reader, without the names."""
    dropped = figures["samples_dropped"]
    reasons = f" ({', '.join(f'{reason} {n}' for reason, n in dropped.items())})" if dropped else ""
    depth, size_bytes = figures["mean_depth_tokens"], figures["mean_depth_bytes"]
    queued = "" if depth is None else f"; {depth:,} tokens ({size_bytes / 2**20:,.1f} MiB) were queued on average"
    return (
        f"{figures['samples_taken']} samples taken, {sum(dropped.values())} dropped{reasons}, {figures['samples_cut']} "
        f"cut by the length limit; {figures['producer_restarts']} restarts of vLLM; the trainer waited "
        f"{figures['trainer_wait_s']:.1f} s ({figures['trainer_wait_share']:.1%}) for data, vLLM "
        f"{figures['producer_starved_s']:.1f} s for room in the queue; vLLM ran {figures['producer_prefill_tokens']:,} "
        f"prompt and made {figures['producer_decode_tokens']:,} answer tokens, "
        f"{figures['producer_prefill_tokens_per_s']:,.0f} and {figures['producer_decode_tokens_per_s']:,.0f} a second "
        f"of its work{queued}"
    )
