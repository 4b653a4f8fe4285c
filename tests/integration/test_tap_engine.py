"""Engines of other kinds than the plain one: two workers, two processes, the V2 runner, int4 weights, pipelines."""

import json
import os

import pytest
from extract_support import ENGINE, QUEUE, all_layers, check_states, choose_runner, extractor, read_target
from fault_support import new_shared_memory
from toy_targets import make_int4_toy, make_toy

from eagle3_lightning.errors import ConfigError, ProducerError
from eagle3_lightning.extract.supervisor import Extractor
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import EngineOptions, SamplingOptions

pytestmark = [pytest.mark.vllm, pytest.mark.tap]
PLAN = LayerPlan((1, 3, 5), 7)


@pytest.mark.parametrize(("name", "runner"), [("qwen3", "v1"), ("qwen3_moe", "v1"), ("qwen3", "v2")])
def test_two_tensor_parallel_workers(name, runner, tmp_path, monkeypatch):
    choose_runner(monkeypatch, runner)
    info, before = read_target(make_toy(name, tmp_path / "target")), set(os.listdir("/dev/shm"))
    assert check_states(info, PLAN, tmp_path, tensor_parallel_size=2, cpu_threads=1) == f"aux/{runner}"
    assert [left for left in new_shared_memory(before) if "-cpushm_" in left] == []
    log = (tmp_path / "vllm.log").read_text()
    assert "world_size=2 rank=1" in log


def test_int4_weights(tmp_path):
    packed, dequantized = make_int4_toy(tmp_path / "target", tmp_path / "dequantized")
    info = read_target(packed)
    # In bfloat16, as such checkpoints are served; one layer off gives more than 0.1.
    check_states(info, all_layers(info), tmp_path, tolerance=0.04, reference=dequantized, dtype="bfloat16")


@pytest.mark.parametrize(
    ("architecture", "extra", "error", "message"),
    [
        ("FooForCausalLM", {}, ProducerError, r"target\.path = '.*'.*FooForCausalLM.*not supported"),
        ("LlamaForCausalLM", {"no_such": 1}, ConfigError, r"data\.engine\.extra\.no_such = 1: this vLLM has no such"),
    ],
    ids=["a target", "an option"],
)
def test_what_vllm_refuses_is_named(tmp_path, architecture, extra, error, message):
    path = make_toy("llama", tmp_path / "target")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    with pytest.raises(error, match=message), extractor(read_target(path), PLAN, tmp_path, extra=extra):
        pass


def test_a_pipeline_is_refused_before_anything_starts(tmp_path):
    info = read_target(make_toy("llama", tmp_path / "target"))
    engine = EngineOptions(**{**vars(ENGINE), "extra": {"pipeline_parallel_size": 2}})
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size.*states of earlier stages"):
        Extractor(info, PLAN, engine, QUEUE, SamplingOptions(), tmp_path)
    assert not (tmp_path / "vllm.log").exists()
