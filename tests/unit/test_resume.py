"""Going on from a checkpoint: one of a finished run is refused, and a run's figures are of all its starts."""

import json

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import Timer
from test_cli import config  # noqa: F401 - a fixture
from test_datamodule import Recorder, make_data, target  # noqa: F401 - fixtures

from eagle3_lightning.callbacks.data_summary import DataSummaryCallback, RunSums
from eagle3_lightning.callbacks.export import ExportCallback
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


def fit_for_figures(data, place, max_steps, ckpt_path=None):
    """A fit with the callbacks that write summary.json; what it wrote, and what its last checkpoint holds of them."""
    module = Eagle3Module(data.target, DraftOptions(draft_vocab_size=64), LossOptions(ttt_steps=2),
                          OptimOptions(lr=1e-3, warmup_steps=0, schedule="constant"))  # fmt: skip
    ours = [DataSummaryCallback(), ExportCallback()]
    trainer = make_trainer(place, max_steps=max_steps, callbacks=ours, default_root_dir=place,
                           check_val_every_n_epoch=None, val_check_interval=4, log_every_n_steps=2)  # fmt: skip
    trainer.fit(module, data, ckpt_path=ckpt_path)
    saved = torch.load(place / f"step={max_steps}.ckpt", weights_only=True)
    states = {type(callback): saved["callbacks"][callback.state_key] for callback in ours}
    return json.loads((place / "summary.json").read_text()), states


def test_the_figures_of_a_resumed_run_are_of_all_its_starts(make_data, tmp_path):  # noqa: F811
    first, states = fit_for_figures(make_data(30, val=4), tmp_path, 6)
    assert isinstance(first["simulated_tau"], float)
    assert (first["simulated_step"], first["steps"]) == (4, 6)
    # One step more, and no validation: the next would be behind step 8.
    second, later = fit_for_figures(make_data(30, val=4), tmp_path, 7, tmp_path / "step=6.ckpt")
    assert second["steps"] == 7
    assert (second["simulated_tau"], second["simulated_step"]) == (first["simulated_tau"], 4)
    before, own, after = states[ExportCallback], states[DataSummaryCallback], later[DataSummaryCallback]
    assert before["seconds"] < later[ExportCallback]["seconds"] < second["seconds"]
    assert second["tokens_trained"] > first["tokens_trained"]
    for name, key in (
        ("taken", "samples_taken"),
        ("prefill_tokens", "producer_prefill_tokens"),
        ("wait_s", "trainer_wait_s"),
    ):
        assert 0 < own[name] < after[name] <= second[key] + 1e-3, name
    assert own["elapsed_s"] < after["elapsed_s"]
    assert (own["depths"], after["depths"]) == (3, 3)  # at steps 2, 4 and 6; step 7 is not logged
    assert second["mean_depth_tokens"] == round(own["depth_tokens"] / 3)
    assert set(second) == set(first)
    assert first["vocab_coverage"] is second["vocab_coverage"] is None  # of so few samples; NaN would be no JSON


def test_a_validation_behind_the_last_checkpoint_is_not_forgotten(make_data, tmp_path):  # noqa: F811
    """Lightning saves a step before it validates there, and the run is resumed from what it saved."""
    first, states = fit_for_figures(make_data(30, val=4), tmp_path, 4)
    assert (first["simulated_step"], states[ExportCallback]["tau"]) == (4, None)
    second, _ = fit_for_figures(make_data(30, val=4), tmp_path, 6, tmp_path / "step=4.ckpt")
    assert (second["simulated_tau"], second["simulated_step"]) == (first["simulated_tau"], 4)
    third, _ = fit_for_figures(make_data(30, val=4), tmp_path, 8, tmp_path / "step=6.ckpt")
    assert third["simulated_step"] == 8
    (tmp_path / "other").mkdir()
    straight, states = fit_for_figures(make_data(30, val=4), tmp_path / "other", 8)
    assert (straight["simulated_step"], states[ExportCallback]["tau"][1]) == (8, 4)
    resumed, _ = fit_for_figures(make_data(30, val=4), tmp_path / "other", 9, tmp_path / "other" / "step=8.ckpt")
    assert resumed["simulated_step"] == 8


def test_a_simulated_length_is_not_overwritten_with_none(make_data, tmp_path):  # noqa: F811
    """Its checkpoint knows nothing of it where an earlier version wrote it."""
    (tmp_path / "summary.json").write_text('{"simulated_tau": 1.5}')
    summary, _ = fit_for_figures(make_data(30), tmp_path, 2)
    assert summary["simulated_tau"] == 1.5
    (tmp_path / "other").mkdir()
    assert fit_for_figures(make_data(30), tmp_path / "other", 2)[0]["simulated_tau"] is None


def test_sums_of_two_starts():
    first = RunSums(10.0, 1.0, 20, 2, dropped={"too_long": 2}, dropped_names={"too_long": ["a", "b"]})
    second = RunSums(5.0, 0.5, 10, dropped={"too_long": 4, "aborted": 1},
                     dropped_names={"too_long": ["c", "d", "e", "f"], "aborted": ["g"]})  # fmt: skip
    second.look(100, 2048)
    both = first + second
    assert (both.elapsed_s, both.wait_s, both.taken, both.cut) == (15.0, 1.5, 30, 2)
    assert both.dropped == {"too_long": 6, "aborted": 1}
    assert both.dropped_names == {"too_long": ["a", "b", "c", "d", "e"], "aborted": ["g"]}
    assert (both.depths, both.depth_tokens, both.depth_bytes) == (1, 100, 2048)
