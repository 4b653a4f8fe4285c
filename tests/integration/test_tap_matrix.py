"""What must hold on every vLLM version: run by scripts/vllm_matrix.sh in an environment for each."""

import pytest
import torch
from extract_support import all_layers, check_states, choose_runner, read_target
from toy_targets import make_toy

from eagle3_lightning.extract import versions
from eagle3_lightning.layers import LayerPlan

pytestmark = [pytest.mark.vllm, pytest.mark.tap]


def check_mixed(path, plan, run_dir):
    """24 mixed requests in small chunks, answered and prefilled, against Transformers."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 200, (24,), generator=generator).tolist()
    return check_states(read_target(path), plan, run_dir, lengths=lengths, max_num_batched_tokens=128, max_num_seqs=16)


def test_every_layer_of_a_llama(tmp_path):
    path = make_toy("llama", tmp_path / "target")
    check_mixed(path, all_layers(read_target(path)), tmp_path)


def test_engine_core_and_worker_as_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    check_mixed(make_toy("qwen3", tmp_path / "target"), LayerPlan((1, 3, 5), 7), tmp_path)


def test_a_deepseek(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # up to 0.25 the CPU has no latent attention; expanded, it is the same
    check_mixed(make_toy("deepseek_v3", tmp_path / "target"), LayerPlan((1, 3, 5), 7), tmp_path)


def test_the_hook_tap(tmp_path):
    info = read_target(make_toy("gemma2", tmp_path / "target"))  # no version hands out its states
    check_mixed(info.path, all_layers(info), tmp_path)


def test_the_v2_model_runner(tmp_path, monkeypatch):
    found = versions.installed()
    assert found is not None
    if versions.release(found[1]) < (0, 25, 0):
        pytest.skip("vLLM has no V2 model runner for the CPU before 0.25")
    choose_runner(monkeypatch, "v2")
    assert check_mixed(make_toy("llama", tmp_path / "target"), LayerPlan((1, 3, 5), 7), tmp_path) == "aux/v2"
