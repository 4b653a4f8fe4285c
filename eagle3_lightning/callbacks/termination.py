"""SIGTERM, as schedulers send it, and Ctrl-C: finish the step, write last.ckpt, end with 143 or 130.

On SIGTERM, Lightning 2.6 ends with 0 and writes nothing, so that a scheduler takes the run for finished; on Ctrl-C it
writes nothing either, and the run could not go on.
"""

import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from eagle3_lightning.errors import Eagle3Error

log = logging.getLogger(__name__)


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TerminatedError(Eagle3Error):
    """The run was asked to end by a signal; its exit status is 128 + the signal, as shells have it."""

    def __init__(self, number: int, what: str) -> None:
        """Say which signal ended the run, and where.

        Args:
            number: of the signal.
            what: the rest of the sentence.
        """
        super().__init__(f"ended by {signal.Signals(number).name}{what}")
        self.exit_code = 128 + number


class TerminationCallback(Callback):
    """Turns SIGTERM and SIGINT into a checkpoint and an exit status of 143 or 130.

    Outside a training step the run ends at once, also while it waits for vLLM or for data; inside one, when the step is
    done. With several ranks all of them end behind the same step, as soon as one of them was asked to.
    """

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._requested = 0  # the signal's number
        self._may_raise = False
        self._previous: dict[int, Any] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the signals over from Lightning."""
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
            self._may_raise = trainer.world_size == 1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has put a handler of its own in front meanwhile, which would end the run with status 0."""
        if self._previous:
            for number in SIGNALS:
                signal.signal(number, self._on_signal)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A step must not be torn apart."""
        self._may_raise = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End here if any rank was asked to.

        Raises:
            TerminatedError: it was.
        """
        requested = bool(self._requested)
        if trainer.world_size > 1:
            requested = bool(trainer.strategy.reduce_boolean_decision(requested, all=False))
        if requested:
            where = f" behind step {trainer.global_step}; --ckpt_path last goes on from there"
            raise TerminatedError(self._requested or signal.SIGTERM, where)
        self._may_raise = trainer.world_size == 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A file that is being written must not be torn apart either."""
        self._may_raise = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the checkpoint behind the last optimizer step."""
        self._restore()
        if isinstance(exception, TerminatedError) and trainer.global_step > 0:
            callback = trainer.checkpoint_callback
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                with torch.no_grad():
                    trainer.save_checkpoint(f"{callback.dirpath}/last.ckpt")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the signals back."""
        self._restore()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._requested = number
        if self._may_raise:
            self._may_raise = False
            raise TerminatedError(number, "")
        log.warning("%s: the run ends behind this step", signal.Signals(number).name)

    def _restore(self) -> None:
        self._may_raise = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
