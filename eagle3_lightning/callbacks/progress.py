"""Progress in one line: loss, tau, tokens/s, queue depth, time left. A bar on a terminal, plain lines elsewhere."""

import sys
import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from eagle3_lightning.checks import NOT_NEGATIVE, check_number

_SHOWN = (
    ("train/loss", "loss {:.3f}"),
    ("train/tau", "tau {:.2f}"),
    ("val/tau", "val tau {:.3f}"),
    ("perf/tokens_per_s", "{:,.0f} tokens/s"),
    ("queue/depth_samples", "queue {:.0f}"),
)


class ProgressCallback(ProgressBar):
    """Replaces Lightning's bars, which do not know how long an unsized stream is."""

    def __init__(self, every_s: float = 10.0) -> None:
        """Choose how often.

        Args:
            every_s: seconds between plain lines, where the output is not a terminal; 0 prints one for every batch.

        Raises:
            ConfigError: a number that makes no sense.
        """
        super().__init__()
        check_number("progress.every_s", every_s, NOT_NEGATIVE, 10.0)
        self._every_s = every_s
        self._enabled = True
        self._bar: Progress | None = None
        self._last_s = self._start_s = 0.0
        self._first_step = 0

    def disable(self) -> None:
        """Lightning calls it on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        """The opposite of `disable`."""
        self._enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line without breaking the bar."""
        if self._bar is not None:
            self._bar.console.print(*args)
        elif self._enabled:
            print(*args, flush=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and the bar on a terminal."""
        self._start_s, self._first_step, self._last_s = time.monotonic(), trainer.global_step, 0.0
        if self._enabled and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[status]}"),
                console=Console(stderr=True),
                transient=False,
            )
            total = trainer.max_steps if trainer.max_steps > 0 else None
            self._bar.add_task("step", total=total, completed=trainer.global_step, status="")
            self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Move the bar, or print a line when it is time."""
        now_s = time.monotonic()
        if not self._enabled or (self._bar is None and now_s - self._last_s < self._every_s):
            return
        self._show(trainer, now_s)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print a line with the new `val tau`."""
        if self._enabled and self._bar is None and not trainer.sanity_checking:
            self._show(trainer, time.monotonic())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the last line."""
        if self._enabled:
            self._show(trainer, time.monotonic())
        self._stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def _show(self, trainer: Trainer, now_s: float) -> None:
        self._last_s = now_s
        step, total = trainer.global_step, trainer.max_steps if trainer.max_steps > 0 else None
        status = status_line({name: float(value) for name, value in trainer.callback_metrics.items()})
        done = step - self._first_step
        if total is not None and done > 0 and step < total:
            left_s = (now_s - self._start_s) / done * (total - step)
            status += f"  {timedelta(seconds=round(left_s))} left"
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0],
                completed=step,
                description=f"step {step}{f'/{total}' if total else ''}",
                status=status,
            )
        else:
            print(f"step {step}{f'/{total}' if total else ''}  {status}", flush=True)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def status_line(metrics: dict[str, float]) -> str:
    """The metrics worth a glance, in one line; those that are not there yet are left out."""
    return "  ".join(text.format(metrics[name]) for name, text in _SHOWN if name in metrics)
