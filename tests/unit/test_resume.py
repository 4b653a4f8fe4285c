"""Going on from a checkpoint: one of a finished run is refused, and a run's figures are of all its starts."""

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Timer
from test_cli import config  # noqa: F401 - a fixture
from test_datamodule import Recorder, make_data, target  # noqa: F401 - fixtures

from eagle3_lightning.cli import main
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.resume import check_unfinished


def make_trainer(directory, **options):
    saver = pl.callbacks.ModelCheckpoint(directory, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [*options.pop("callbacks", []), saver]
    return pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                      num_sanity_val_steps=0, callbacks=callbacks, **{"max_epochs": -1, **options})  # fmt: skip


@pytest.mark.parametrize(
    ("options", "more", "option"),
    [
        ({"max_steps": 4}, {"max_steps": 5}, "trainer.max_steps = 4"),
        ({"max_epochs": 1}, {"max_epochs": 2}, "trainer.max_epochs = 1"),
        ({"max_epochs": 1, "accumulate_grad_batches": 2}, {"max_epochs": 2}, "trainer.max_epochs = 1"),
        ({"max_epochs": 2, "max_time": "00:00:00:01"}, {"max_time": "00:01:00:00"}, "trainer.max_time = '0:00:01'"),
    ],
)
def test_a_checkpoint_at_the_end_is_refused_and_one_before_it_is_not(make_data, tmp_path, options, more, option):  # noqa: F811
    class Slow(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            for timer in (callback for callback in trainer.callbacks if isinstance(callback, Timer)):
                timer._start_time["train"] -= 0.25  # as if a step took so long

    trainer = make_trainer(tmp_path, callbacks=[Slow()], **options)
    trainer.fit(Recorder(), make_data(30))
    files = sorted(tmp_path.glob("step=*.ckpt"), key=lambda file: int(file.stem.removeprefix("step=")))
    assert len(files) > 2
    *before, last = (torch.load(file, weights_only=True) for file in files)
    again = make_trainer(tmp_path, **options)
    for saved in before:
        check_unfinished(saved, "some.ckpt", again)
    with pytest.raises(ConfigError, match=f"{option}: this run is finished, some.ckpt stands behind") as refused:
        check_unfinished(last, "some.ckpt", again)
    assert f"Raise {refused.value.option} to train on" in str(refused.value)
    check_unfinished(last, "some.ckpt", make_trainer(tmp_path, **{**options, **more}))


def test_fit_refuses_a_finished_run_before_it_touches_it(config, capsys):  # noqa: F811
    options = yaml.safe_load(config.read_text())
    place = TargetOptions(options["target"]["path"])
    module = Eagle3Module(place, DraftOptions(draft_vocab_size=64), LossOptions(), OptimOptions(warmup_steps=1))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, max_steps=5)
    trainer.strategy.connect(module)
    file = config.parent / "run" / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(file)
    saved = torch.load(file, weights_only=True)
    arguments = ["fit", "--config", str(config), "--ckpt_path", "last", "--data.prompts.train=/nowhere.jsonl"]
    files = {path.relative_to(config.parent) for path in config.parent.rglob("*")}
    for step, told in ((5, "trainer.max_steps = 5: this run is finished"), (4, "there is no such file")):
        torch.save({**saved, "global_step": step}, file)
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert told in error
        assert {path.relative_to(config.parent) for path in config.parent.rglob("*")} == files
