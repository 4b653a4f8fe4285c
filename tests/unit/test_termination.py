"""A signal at every point of a step with several micro-batches: the checkpoint, and what a resume makes of it.

A real Trainer and a real signal to this process; real queue, toy engine.
"""

import os
import signal
import threading

import lightning.pytorch as pl
import pytest
import torch
from test_datamodule import Recorder, make_data, target  # noqa: F401 - fixtures

from eagle3_lightning.callbacks.termination import TerminationCallback, rewind_batches
from eagle3_lightning.checkpoints import WholeFileIO
from eagle3_lightning.errors import TerminatedError

OPTIONS = {"accumulate_grad_batches": 3, "max_epochs": 9, "max_steps": 12, "num_sanity_val_steps": 0}
POINTS = ("in a step", "waiting for data")


class Signal(pl.Callback):
    """Sends one in micro-batch `number`, or after it, when the next one is waited for."""

    def __init__(self, sign, number, point):
        self.sign, self.number, self.point, self.seen = sign, number, point, 0

    def on_train_batch_start(self, *args):
        self.seen += 1
        if self.seen == self.number and self.point == POINTS[0]:
            os.kill(os.getpid(), self.sign)

    def on_train_batch_end(self, *args):
        # Behind TerminationCallback's own, so that the signal comes between two micro-batches.
        if self.seen == self.number and self.point == POINTS[1]:
            os.kill(os.getpid(), self.sign)


def fit(data, directory, *callbacks, ckpt_path=None, module=None, **options):
    saver = pl.callbacks.ModelCheckpoint(directory, "{step}", every_n_train_steps=100, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[*callbacks, saver], plugins=[WholeFileIO()], **{**OPTIONS, **options},
    )  # fmt: skip
    module = module or Recorder()
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


@pytest.fixture
def whole(make_data, tmp_path):  # noqa: F811
    return fit(make_data(30), tmp_path / "whole")


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    ("sign", "number"),
    [*((signal.SIGTERM, number) for number in (4, 5, 6, 7, 14)), (signal.SIGINT, 5)],
)
def test_a_resume_goes_on_behind_the_last_whole_step(make_data, whole, tmp_path, sign, point, number):  # noqa: F811
    before, cut = signal.getsignal(sign), Recorder()
    termination = TerminationCallback()
    with pytest.raises(TerminatedError, match=sign.name) as ended:
        fit(make_data(30), tmp_path, termination, Signal(sign, number, point), module=cut)
    termination.end()
    assert signal.getsignal(sign) == before
    assert ended.value.exit_code == 128 + sign
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    steps = saved["global_step"]
    assert steps in whole.steps
    assert sum(len(cut.steps[step]) for step in range(steps)) == saved["ToyDataModule"]["next_sample"]
    rest = fit(make_data(30), tmp_path, TerminationCallback(), ckpt_path=tmp_path / "last.ckpt")
    assert rest.steps == {step: ids for step, ids in whole.steps.items() if step >= steps}
    assert torch.equal(rest.weight, whole.weight)
    signal.signal(sign, before)


def test_a_checkpoint_by_the_clock_in_the_middle_of_a_step_can_be_resumed(make_data, whole, tmp_path):  # noqa: F811
    """ModelCheckpoint.train_time_interval does not ask where the step stands."""

    class InTheMiddle(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    fit(make_data(30), tmp_path / "a", TerminationCallback(), InTheMiddle(), max_epochs=1, max_steps=-1)
    rest = fit(make_data(30), tmp_path / "b", TerminationCallback(), ckpt_path=tmp_path / "middle.ckpt")
    assert min(rest.steps) == 1
    assert rest.steps == {step: ids for step, ids in whole.steps.items() if step >= 1}
    assert torch.equal(rest.weight, whole.weight)


def test_a_full_disk_at_the_end_does_not_hide_the_signal(make_data, tmp_path, caplog):  # noqa: F811
    class Full(WholeFileIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            (tmp_path / "last.ckpt").mkdir(exist_ok=True)  # a real OSError: a directory is where the file should be
            super().save_checkpoint(checkpoint, path, storage_options)

    data = make_data(30)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, plugins=[Full()],
        callbacks=[
            termination := TerminationCallback(), Signal(signal.SIGTERM, 6, POINTS[0]),
            pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=100, save_last=True),
        ], **OPTIONS,
    )  # fmt: skip
    with pytest.raises(TerminatedError, match="SIGTERM"):
        trainer.fit(Recorder(), data)
    termination.end()
    assert "last.ckpt could not be written" in caplog.text
    assert not data.is_open
    assert not [t for t in threading.enumerate() if t.name.startswith("eagle3-batches")]


def test_a_count_that_fits_its_steps_is_left_alone():
    def count(ready, processed, completed):
        numbers = {"ready": ready, "started": ready, "processed": processed, "completed": completed}
        return {"total": {k: v + 10 for k, v in numbers.items()}, "current": numbers, "is_last_batch": False}

    for ready, processed, completed in ((6, 6, 6), (6, 6, 5)):
        progress = count(ready, processed, completed)
        rewind_batches(progress, 6)
        assert progress == count(ready, processed, completed)
    for ready, processed, completed in ((7, 6, 6), (7, 7, 6), (8, 8, 8)):
        progress = count(ready, processed, completed)
        rewind_batches(progress, 6)
        assert progress == count(6, 6, 6)
