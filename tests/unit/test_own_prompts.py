"""Prompts that the target writes: once for their options, last of all checks, in the engine that makes the samples."""

import json
import shutil
import threading
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from test_cli import config  # noqa: F401
from test_datamodule import Recorder, fit, write_prompts
from toy_engine import ToyDataModule
from toy_target import make_target

from eagle3_lightning.cli import main
from eagle3_lightning.errors import ConfigError, SampleError
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    EngineOptions,
    PromptOptions,
    SamplingOptions,
    SynthesisOptions,
    TargetOptions,
)
from eagle3_lightning.prompts import own, synthesis


@pytest.fixture
def written(monkeypatch):
    """The options of each writing."""
    calls = []

    def write(extractor, info, chat, options, out):
        assert not out.exists()
        calls.append(options)
        return synthesis.write_prompts(extractor, info, chat, options, out)

    monkeypatch.setattr(own, "write_prompts", write)
    return calls


@pytest.fixture
def make_data(tmp_path):
    target = make_target(tmp_path / "target")

    def make(target=target, kwargs=None, cache=None, **synthesis):
        return ToyDataModule(
            TargetOptions(str(target)),
            PromptOptions(
                "self",
                val_fraction=0.0,
                chat_template_kwargs=kwargs or {},
                synthesis=SynthesisOptions(**{"num_prompts": 12} | synthesis),
            ),
            SamplingOptions(max_new_tokens=8),
            EngineOptions(max_model_len=512),
            batch=BatchOptions(pack_tokens=160, static_shapes=False, calibration_tokens=300),
            cache=CacheOptions(cache),
            run_dir=tmp_path / "run",
        )

    return make


def start_to_train(run_dir):
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints/last.ckpt").touch()


def test_they_are_written_once_for_the_same_options(make_data, written, tmp_path):
    for _ in range(2):
        module = fit(make_data())
        assert sum(len(batch.sample_ids) for batch in module.batches) > 6
    start_to_train(tmp_path / "run")
    fit(make_data())
    assert len(written) == 1


def test_they_are_written_by_the_engine_that_makes_the_samples(make_data, tmp_path, capsys):
    data = make_data(seed=3)
    fit(data)
    assert data.num_engines == 1
    rows = [json.loads(line) for line in (tmp_path / "run/self_prompts.jsonl").read_text().splitlines()]
    texts = [row["messages"][0].pop("content") for row in rows]
    assert rows == [{"id": f"self-{number}", "messages": [{"role": "user"}]} for number in range(12)]
    assert len(set(texts)) == 12
    assert not any("im_end" in text for text in texts)
    assert json.loads((tmp_path / "run/self_prompts.json").read_text())["synthesis.seed"] == 3
    assert "the target wrote its own prompts: 12 of " in capsys.readouterr().err
    again = make_data(seed=3)  # they are there
    fit(again)
    assert again.num_engines == 1


def test_an_engine_without_samples_to_make_ends_behind_the_prompts(make_data, tmp_path, caplog):
    caplog.set_level("INFO", "eagle3_lightning")
    made = fit(make_data(cache=tmp_path / "cache"), max_epochs=2)
    shutil.rmtree(tmp_path / "run")
    data = make_data(cache=tmp_path / "cache")
    read = fit(data, max_epochs=2)
    assert data.num_engines == 1
    assert "vLLM has written the prompts and ends" in caplog.text
    assert torch.equal(made.weight, read.weight)


def test_a_target_that_writes_too_few_ends_the_run_and_the_engine(make_data, tmp_path):
    with pytest.raises(SampleError, match=r"too few usable prompts: 0 of 96 kept; thrown away: 96 short"):
        fit(make_data(min_tokens=128))
    assert not (tmp_path / "run/self_prompts.jsonl").exists()
    assert not [thread for thread in threading.enumerate() if thread.name in ("eagle3-queue", "eagle3-hub")]


def test_a_validation_beside_held_out_prompts_writes_none(make_data, written, tmp_path):
    data = make_data()
    data.prompts = replace(data.prompts, val=[write_prompts(tmp_path / "val.jsonl", 6)])
    module = Recorder()
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.validate(module, data)
    assert sum(map(len, module.val)) > 3
    assert data.num_engines == 1
    assert written == []


OTHERS = [
    ({"num_prompts": 9}, "data.prompts.synthesis.num_prompts .synthesis.num_prompts 12 there, 9 here"),
    ({"seed": 1}, "data.prompts.synthesis.seed"),
    ({"temperature": 0.5, "top_k": 3}, "data.prompts.synthesis.temperature, data.prompts.synthesis.top_k"),
    ({"kwargs": {"enable_thinking": False}}, "data.prompts.chat_template_kwargs"),
    ({"target": "other"}, "another target"),
]


@pytest.mark.parametrize(("changed", "named"), OTHERS, ids=lambda value: str(value)[:30])
def test_others_are_written_anew_by_a_fresh_run_and_refused_by_a_resumed_one(
    make_data, written, tmp_path, caplog, changed, named
):
    if "target" in changed:
        changed = {"target": make_target(tmp_path / "other", seed=1)}
    fit(make_data())
    fit(make_data(**changed))
    assert len(written) == 2 and caplog.text.count("it is written anew") == 1
    fit(make_data(**changed))
    fit(make_data())
    assert len(written) == 3
    start_to_train(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"data.prompts.train = 'self': .*{named}") as caught:
        fit(make_data(**changed))
    assert len(str(caught.value).splitlines()) == 1
    fit(make_data())
    assert len(written) == 3


@pytest.mark.parametrize("text", [None, "", "[]", "{"])
def test_prompts_of_unknown_origin_are_kept_by_a_resumed_run_alone(make_data, written, tmp_path, text):
    for number in (1, 2):
        fit(make_data())
        assert len(written) == number
        facts = tmp_path / "run/self_prompts.json"
        facts.unlink() if text is None else facts.write_text(text)
    start_to_train(tmp_path / "run")
    fit(make_data())
    assert len(written) == 2


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("data.prompts.val", "/nowhere.jsonl", "data.prompts.val = '/nowhere.jsonl': there is no such file"),
        ("data.prompts.train", "[self, /nowhere.jsonl]", "data.prompts.train = '/nowhere.jsonl': there is no such"),
        ("data.cache.dir", "FILE", "data.cache.dir = "),
        ("data.queue.capacity_tokens", "64", "data.queue.capacity_tokens = 64"),
        ("data.queue.capacity_tokens", "100000000000000", "GiB of memory are available"),
        ("data.queue.socket_dir", "/nowhere", "data.queue.socket_dir = '/nowhere'"),
        ("data.engine.extra", "{model: x}", "data.engine.extra"),
        ("data.prompts.synthesis.max_tokens", "5000", "synthesis.max_tokens = 5000"),
        ("data.sampling.max_new_tokens", "2047", "none of the first 1 samples can be used (1 too_long): self, line 1"),
        ("data.batch.pack_tokens", "99", "data.batch.pack_tokens = 99"),
        ("data.sampling.mode", "prefill", "none of the first 1 samples can be used (1 empty_mask): self, line 1"),
    ],
)
def test_everything_else_is_checked_before_they_are_written(config, written, capsys, option, value, message):  # noqa: F811
    arguments = ["--data.prompts.train", "self", f"--{option}", str(config) if value == "FILE" else value]
    assert main(["fit", "--config", str(config), *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eagle3 fit: ")]
    assert message in line and "/tmp/eagle3-" not in line
    assert written == []


# ---- what a refused run leaves -------------------------------------------------------------------------------------


@pytest.mark.parametrize("logger", ["CSVLogger", "WandbLogger"])
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("data.prompts.train", "/nowhere.jsonl"),
        ("data.prompts.val", "/nowhere.jsonl"),
        ("data.cache.dir", "FILE"),
        ("data.queue.capacity_tokens", "64"),
        ("data.engine.max_model_len", "9999"),
    ],
)
def test_a_refused_run_leaves_nothing(config, capsys, monkeypatch, logger, option, value):  # noqa: F811
    if logger == "WandbLogger":
        pytest.importorskip("wandb")
        monkeypatch.setenv("WANDB_MODE", "offline")
    arguments = [f"--trainer.logger={logger}", f"--{option}", str(config) if value == "FILE" else value]
    for _ in range(2):
        assert main(["fit", "--config", str(config), *arguments]) == 2
        assert f"eagle3 fit: {option} = " in capsys.readouterr().err
    assert not (config.parent / "run").exists()
