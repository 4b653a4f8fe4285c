"""SIGTERM, as schedulers send it, and Ctrl-C: finish the step, write last.ckpt, end with 143 or 130.

On SIGTERM, Lightning 2.6 ends with 0 and writes nothing, so that a scheduler takes the run for finished; on Ctrl-C it
writes nothing either, and the run could not go on.
"""

import logging
import signal
import subprocess
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from eagle3_lightning.errors import CheckpointError, TerminatedError

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
RANKS_TIMEOUT_S = 10.0


class TerminationCallback(Callback):
    """Turns SIGTERM and SIGINT into a checkpoint and an exit status of 143 or 130.

    Outside a training step the run ends at once, also while it starts or waits for vLLM or for data; inside one, when
    the step is done. With several ranks all of them end behind the same step, as soon as one of them was asked to; at
    the start each ends at once.
    """

    def __init__(self) -> None:
        """Nothing was asked yet."""
        self._requested = 0  # the signal's number
        self._may_raise = True
        self._training = self._trained = False
        self._ending = False
        self._previous: dict[int, Any] = {}
        self._ranks: list[subprocess.Popen[Any]] = []
        self._hosts: dist.ProcessGroup | None = None

    def listen(self) -> None:
        """Take the signals over, until `end`; a fit does so by itself if nobody did."""
        if not self._previous and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def end(self) -> None:
        """Give the signals back, and see the other ranks off that a failed run has left behind."""
        for rank in self._ranks:
            try:  # at the start they wait for this one, and would do so for long
                rank.wait(RANKS_TIMEOUT_S if self._trained else 0.5)
            except subprocess.TimeoutExpired:
                rank.kill()
        self._ranks = []
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where a fit begins that was not started by the command line."""
        self.listen()
        self._check()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has put a handler of its own in front meanwhile, which would end the run with status 0."""
        if self._previous:
            for number in SIGNALS:
                signal.signal(number, self._on_signal)
        self._training = self._trained = True
        self._may_raise = trainer.world_size == 1
        if trainer.world_size > 1:
            # Between the hosts: a decision that went over the GPUs, as Lightning's own does, would wait for them at
            # every step.
            self._hosts = dist.new_group(backend="gloo")
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]
        if trainer.world_size == 1:
            self._check()

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
        requested = self._requested
        if trainer.world_size > 1:
            number = torch.tensor(requested)
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._hosts)
            requested = int(number)
        if requested:
            raise TerminatedError(requested, f" behind step {trainer.global_step}")
        self._may_raise = trainer.world_size == 1

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """A file that is being written must not be torn apart, and must not count batches that led to no step yet."""
        self._may_raise = False
        datamodule: Any = trainer.datamodule  # type: ignore[attr-defined]
        if datamodule is not None and "loops" in checkpoint:
            batches = datamodule.state_dict().get("batches_in_epoch")
            if batches is not None:
                rewind_batches(checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"], batches)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the checkpoint behind the last optimizer step."""
        self._may_raise, self._ending = False, True
        self._take_ranks(trainer)
        # At the start, or on one rank alone, there is nothing to save and nobody to meet at its barriers.
        if isinstance(exception, TerminatedError) and self._training and trainer.global_step > 0:
            self._save(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What follows, the export among it, can be left at any point."""
        self._training, self._may_raise = False, True

    def _save(self, trainer: Trainer) -> None:
        callback = trainer.checkpoint_callback
        if not isinstance(callback, ModelCheckpoint) or callback.dirpath is None:
            return
        file = f"{callback.dirpath}/last.ckpt"
        try:
            with torch.no_grad():
                trainer.save_checkpoint(file)
        except CheckpointError as error:  # the run ends for the signal's reason, and vLLM with it
            log.error("%s", error)
            return
        log.warning("wrote %s behind step %d; --ckpt_path last goes on from there", file, trainer.global_step)

    def _take_ranks(self, trainer: Trainer) -> None:
        """Have Lightning forget the ranks that it started: at the end of one it would kill this one in its last words.

        Its observer reads this very list.
        """
        ranks = getattr(trainer.strategy.launcher, "procs", None)
        if ranks:
            self._ranks = list(ranks)
            ranks.clear()

    def _check(self) -> None:
        """A library may have swallowed what the signal's handler raised, in a destructor for example."""
        if self._requested:
            raise TerminatedError(self._requested)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._ending:
            log.warning("%s: the run is ending already", name)
            return
        self._requested = number
        if self._may_raise:
            self._may_raise = False
            raise TerminatedError(number)
        log.warning("%s: the run ends behind this step", name)


def rewind_batches(progress: dict[str, Any], batches: int) -> None:
    """Have a checkpoint's count of batches say what its weights have seen.

    A signal or a clock may come between the micro-batches of a step, or between a batch and its step; a resumed run
    gets these batches once more, and Lightning would count them twice: every later step would be shifted.

    Args:
        progress: Lightning's count as it saves it.
        batches: of the running epoch that led to a step.
    """
    current, total = progress["current"], progress["total"]
    if progress["is_last_batch"] or current["ready"] == current["processed"] == batches:
        return  # `completed` may be one less: Lightning knows that from a checkpoint written at a batch's end
    for count in current:
        total[count] -= current[count] - batches
        current[count] = batches


def _nothing() -> None:
    """Where this callback has done it already."""
