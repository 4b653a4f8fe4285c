"""The acceptance callback on a real module and a real vLLM: what it logs and keeps, and that a failure ends nothing."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from serve_support import TARGET, echo_draft, target_info

from eagle3_lightning.callbacks.acceptance import BEST_DIR, AcceptanceCallback
from eagle3_lightning.callbacks.export import SUMMARY_FILE, ExportCallback
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import (
    DraftOptions,
    EngineOptions,
    LossOptions,
    OptimOptions,
    PromptOptions,
    TargetOptions,
)

pytestmark = pytest.mark.vllm


def make_trainer(run_dir: Path, callbacks: list[Any]) -> Any:
    """What the callback asks of a Trainer, at step 7."""
    return SimpleNamespace(
        global_step=7, is_global_zero=True, world_size=1, loggers=[CSVLogger(run_dir, "logs")], callbacks=callbacks,
        datamodule=None, default_root_dir=str(run_dir),
    )  # fmt: skip


def make_module() -> Eagle3Module:
    options = DraftOptions(draft_vocab_size=None, norm_before_residual=False)
    module = Eagle3Module(TargetOptions(str(TARGET)), options, LossOptions(), OptimOptions())
    module.draft.load_state_dict(echo_draft(target_info(), None).state_dict())
    module.load_target()
    return module


def test_served_acceptance_is_logged_and_the_best_draft_kept(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "0" * 40}) + "\n")
    acceptance = AcceptanceCallback(prompts, max_new_tokens=30, concurrency=1)
    trainer = make_trainer(tmp_path, [ExportCallback(tmp_path), acceptance])
    acceptance.on_train_end(trainer, make_module())
    for logger in trainer.loggers:
        logger.save()
    (row,) = csv.DictReader((tmp_path / "logs" / "version_0" / "metrics.csv").open())
    assert row["step"] == "7"
    length = float(row["serve/acceptance_length"])
    assert 2.5 < length < 4.0  # zeros upon zeros: nearly every round keeps all three tokens
    assert length == pytest.approx(1 + sum(float(row[f"serve/accepted_{k}"]) for k in (1, 2, 3)))
    assert float(row["serve/real_differences"]) == 0.0
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["served_acceptance_length"] == pytest.approx(length)
    assert acceptance.state_dict() == {"best": length, "measured_step": 7}
    resumed = AcceptanceCallback(prompts, every_n_steps=7)
    resumed.load_state_dict(acceptance.state_dict())
    resumed.on_train_batch_end(trainer, None, None, None, 0)  # of step 8's first micro-batch: would fail if it measured
    assert {file.name for file in (tmp_path / BEST_DIR).iterdir()} == {
        "config.json", "model.safetensors", "eagle3_lightning.json"
    }  # fmt: skip


def test_a_draft_that_cannot_be_served_does_not_end_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("not JSON\n")
    acceptance = AcceptanceCallback(prompts)
    trainer = make_trainer(tmp_path, [ExportCallback(tmp_path), acceptance])
    acceptance.on_train_end(trainer, make_module())
    assert "could not be served: --prompts" in capsys.readouterr().out
    assert not (tmp_path / BEST_DIR).exists()


def test_missing_prompts_are_refused_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"acceptance\.prompts"):
        AcceptanceCallback(tmp_path / "none").setup(make_trainer(tmp_path, []), make_module(), "fit")


def test_the_bench_runs_the_target_as_the_run_does(tmp_path: Path) -> None:
    acceptance = AcceptanceCallback(tmp_path / "p", gpu_memory_utilization=0.3)
    trainer = make_trainer(tmp_path, [acceptance])
    engine = EngineOptions(
        tensor_parallel_size=2, dtype="float16", gpu_memory_utilization=0.6, extra={"block_size": 32}
    )
    prompts = PromptOptions("p", chat_template_kwargs={"enable_thinking": False})
    trainer.datamodule = SimpleNamespace(engine=engine, prompts=prompts)
    options = acceptance._bench_options(trainer, make_module(), tmp_path / "export", tmp_path / "p")
    assert options.engine == replace(engine, gpu_memory_utilization=0.3)
    assert options.chat_template_kwargs == {"enable_thinking": False}
    assert options.target == str(TARGET.resolve())
