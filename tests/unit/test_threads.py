"""How many threads torch trains with beside a vLLM on the CPU. Real queue, toy engine."""

import os
from collections.abc import Iterator
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from test_datamodule import Recorder, write_prompts
from toy_engine import ToyDataModule
from toy_target import make_target

from eagle3_lightning.callbacks.threads import ThreadsCallback, trainer_threads
from eagle3_lightning.options import CacheOptions, EngineOptions, PromptOptions, SamplingOptions, TargetOptions

CORES = len(os.sched_getaffinity(0))
MANY = CORES + 3


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(MANY)
    yield
    torch.set_num_threads(before)


def fit(directory: Path, cpu_threads: int | None, cache: Path | None = None) -> int:
    """The threads that a fit of one step has had."""
    data = ToyDataModule(
        TargetOptions(str(make_target(directory / "target"))),
        PromptOptions([str(write_prompts(directory / "train.jsonl", 20))], val_fraction=0.0),
        SamplingOptions(mode="prefill"),
        EngineOptions(max_model_len=512, cpu_threads=cpu_threads),
        cache=CacheOptions(cache),
        run_dir=directory / "run",
    )
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, callbacks=[ThreadsCallback()],
    )  # fmt: skip
    trainer.fit(Recorder(), data)
    return torch.get_num_threads()


@pytest.mark.parametrize(
    ("cores", "cpu_threads", "ranks", "threads"),
    [(2, 1, 1, 1), (8, 2, 1, 6), (8, 2, 2, 3), (2, 2, 1, 1), (2, 9, 4, 1), (8, None, 1, 4), (1, None, 1, 1)],
)
def test_what_vllm_leaves_is_shared(cores: int, cpu_threads: int | None, ranks: int, threads: int) -> None:
    assert trainer_threads(cores, cpu_threads, ranks) == threads


def test_a_fit_beside_vllm_leaves_it_its_cores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert fit(tmp_path, cpu_threads=1) == max(1, CORES - 1)
    (line,) = [text for text in caplog.messages if text.startswith("torch trains with ")]
    assert f"on the same {CORES} cores, with data.engine.cpu_threads = 1 (OMP_NUM_THREADS sets another" in line


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(MANY))
    assert fit(tmp_path, cpu_threads=1) == MANY


def test_without_vllm_all_cores_are_the_trainers(tmp_path: Path) -> None:
    fit(tmp_path, 1, tmp_path / "cache")
    torch.set_num_threads(MANY)
    assert fit(tmp_path, 1, tmp_path / "cache") == MANY
