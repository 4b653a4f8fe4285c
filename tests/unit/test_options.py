"""Senseless numbers are refused when the options are made, and the edges that make sense are not."""

import math
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning  # noqa: F401 - its log handler keeps the stderr of the moment: not one that a test captures and closes
import pytest
import toy_target

from eagle3_lightning.callbacks.acceptance import AcceptanceCallback
from eagle3_lightning.callbacks.export import ExportCallback
from eagle3_lightning.cli import main
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import (
    BatchOptions,
    CacheOptions,
    DraftOptions,
    EngineOptions,
    LossOptions,
    OptimOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    SourceOptions,
    SynthesisOptions,
    TargetOptions,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target.make_target(tmp_path_factory.mktemp("target") / "tiny")


def prompts(**options: Any) -> PromptOptions:
    return PromptOptions("prompts.jsonl", **options)


EXPORT = ["export", "--ckpt", "/nowhere.ckpt", "--out", "{}/out"]
BENCH = ["bench", "--draft", "/nowhere", "--prompts", "{}/p"]
NUMBERS: list[tuple[Any, str, str, list[Any], list[Any]]] = [
    # what takes it, its group, the option, values to refuse, values to take
    (DraftOptions, "model.draft", "num_layers", [0, -1], [1]),
    (DraftOptions, "model.draft", "sliding_window", [0], [1, None]),
    (LossOptions, "model.loss", "ttt_steps", [0, -1], [1]),
    (LossOptions, "model.loss", "ttt_decay", [0.0, 1.1], [0.5, 1.0]),
    (OptimOptions, "model.optim", "lr", [0.0, -1e-4], [1e-9]),
    (OptimOptions, "model.optim", "weight_decay", [-0.1], [0.0, 0.1]),
    (OptimOptions, "model.optim", "betas", [(0.9, 1.0), (-0.1, 0.9)], [(0.0, 0.999), [0.9, 0.95]]),
    (OptimOptions, "model.optim", "warmup_steps", [-1], [0]),
    (OptimOptions, "model.optim", "final_lr_ratio", [-0.1, 1.1], [0.0, 1.0]),
    (EngineOptions, "data.engine", "max_model_len", [1, 0], [2]),
    (EngineOptions, "data.engine", "max_num_seqs", [0], [1]),
    (EngineOptions, "data.engine", "max_num_batched_tokens", [0], [1, None]),
    (EngineOptions, "data.engine", "tensor_parallel_size", [0], [1]),
    (EngineOptions, "data.engine", "gpu_memory_utilization", [0.0, 1.01, 90], [0.01, 1.0]),
    (EngineOptions, "data.engine", "kv_cache_gib", [0], [1]),
    (EngineOptions, "data.engine", "cpu_threads", [0], [1, None]),
    (EngineOptions, "data.engine", "start_timeout_s", [0.0, -1.0], [0.1]),
    (EngineOptions, "data.engine", "step_timeout_s", [0.0], [0.1]),
    (SamplingOptions, "data.sampling", "max_new_tokens", [0], [1]),
    (SamplingOptions, "data.sampling", "temperature", [-0.1], [0.0, 2.0]),
    (SamplingOptions, "data.sampling", "top_p", [0.0, 1.1], [0.1, 1.0]),
    (SamplingOptions, "data.sampling", "top_k", [-2], [-1, 0, 20]),
    (QueueOptions, "data.queue", "capacity_tokens", [0], [1]),
    (QueueOptions, "data.queue", "block_tokens", [0], [1]),
    (QueueOptions, "data.queue", "max_dropped_share", [-0.1, 1.1], [0.0, 1.0]),
    (BatchOptions, "data.batch", "pack_tokens", [1, 0], [2]),
    (BatchOptions, "data.batch", "calibration_tokens", [0], [1]),
    (BatchOptions, "data.batch", "max_restarts", [-1], [0]),
    (prompts, "data.prompts", "val_fraction", [-0.1, 1.0], [0.0, 0.99]),
    (prompts, "data.prompts", "max_val_samples", [0], [1]),
    (CacheOptions, "data.cache", "max_gib", [0.0, -1.0], [0.5, math.inf]),
    (SynthesisOptions, "data.prompts.synthesis", "num_prompts", [0], [1]),
    (SynthesisOptions, "data.prompts.synthesis", "min_tokens", [0], [1, 128]),
    (SynthesisOptions, "data.prompts.synthesis", "max_tokens", [0, 3], [4]),  # min_tokens is 4
    (SynthesisOptions, "data.prompts.synthesis", "temperature", [0.0], [0.1]),
    (SynthesisOptions, "data.prompts.synthesis", "top_p", [0.0, 1.1], [1.0]),
    (SynthesisOptions, "data.prompts.synthesis", "top_k", [-2], [-1, 0, 50]),
    (AcceptanceCallback, "acceptance", "every_n_steps", [-1], [None, 0, 1]),
    (AcceptanceCallback, "acceptance", "num_speculative_tokens", [0], [None, 1]),
    (AcceptanceCallback, "acceptance", "max_new_tokens", [0], [1]),
    (AcceptanceCallback, "acceptance", "max_prompts", [0], [1]),
    (AcceptanceCallback, "acceptance", "concurrency", [0, -1], [1]),
    (AcceptanceCallback, "acceptance", "gpu_memory_utilization", [0.0, 1.1], [0.2, 1.0]),
    (ExportCallback, "export", "every_n_steps", [-1], [None, 0, 1]),
    (ExportCallback, "export", "num_speculative_tokens", [0, -1], [None, 1]),
]


@pytest.mark.parametrize(
    ("made", "group", "name", "value"),
    [(made, group, name, value) for made, group, name, refused, _ in NUMBERS for value in [*refused, math.nan]],
)
def test_a_senseless_number_is_refused(made: Any, group: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**{name: value})
    assert refused.value.option == f"{group}.{name}"
    assert refused.value.value is value
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("made", "name", "value"), [(made, name, value) for made, _, name, _, taken in NUMBERS for value in taken]
)
def test_the_edges_are_taken(made: Any, name: str, value: Any) -> None:
    assert getattr(made(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("made", "option"),
    [(made, f"{group}.{name}") for made, group, name, _, taken in NUMBERS if is_dataclass(made) and None not in taken]
    + [
        (SamplingOptions, "data.sampling.mode"),
        (EngineOptions, "data.engine.enforce_eager"),
        (TargetOptions, "target.path"),
        (partial(SourceOptions, "prompts.jsonl"), "data.prompts.train.fields"),
    ],
)
def test_null_is_refused_where_it_means_nothing(made: Any, option: str) -> None:
    with pytest.raises(ConfigError) as refused:
        made(**{option.rpartition(".")[2]: None})
    assert refused.value.option == option


@pytest.mark.parametrize("made", [made for made, *_ in NUMBERS])
def test_the_defaults_make_sense(made: Any) -> None:
    made()


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as refused:
        OptimOptions(betas=(0.9, 1.0))
    assert str(refused.value) == (
        "model.optim.betas = (0.9, 1.0): each must lie in [0, 1). Correct it, or leave it out for the default, "
        "(0.9, 0.95)."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*EXPORT, "--num-speculative-tokens", "0"], "--num_speculative_tokens = 0"),
        ([*EXPORT, "--target_name", ""], "--target_name = ''"),
        ([*EXPORT, "--target="], "--target = ''"),
        ([*BENCH, "--max-prompts", "0"], "--max-prompts = [0]"),
        ([*BENCH, "--max-new-tokens", "0"], "--max-new-tokens = [0]"),
        ([*BENCH, "--target="], "--target = ''"),
        ([*BENCH, "--engine.kv_cache_gib", "0"], "engine.kv_cache_gib = 0"),
    ],
)
def test_zero_is_not_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([argument.format(tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "option",
    [
        "model.optim.lr",
        "data.engine.max_num_seqs",
        "data.sampling.top_p",
        "data.queue.block_tokens",
        "data.batch.pack_tokens",
        "data.cache.max_gib",
        "data.prompts.max_val_samples",
        "data.prompts.synthesis.num_prompts",
        "acceptance.concurrency",
        "export.num_speculative_tokens",
    ],
)
def test_the_command_line_names_the_option(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    arguments = ["fit", "--run_dir", str(tmp_path / "run"), "--target.path", str(target), "--trainer.max_steps=1"]
    arguments += ["--model.draft.draft_vocab_size=64", "--data.prompts.train", "p.jsonl"]
    assert main([*arguments, f"--{option}=0"]) == 2
    error = capsys.readouterr().err
    assert f"{option} = 0" in error
    assert "Traceback" not in error
