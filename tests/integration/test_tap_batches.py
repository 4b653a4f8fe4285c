"""However vLLM cuts, mixes and preempts requests: every sample equals the same prompt run alone. A toy in float32."""

import time
from pathlib import Path

import pytest
import torch
from extract_support import (
    Extractor,
    add_to_python_path,
    choose_runner,
    collect,
    extractor,
    random_prompts,
    read_target,
    reference_states,
    relative_error,
)
from toy_targets import make_toy

from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import SamplingOptions

pytestmark = [pytest.mark.vllm, pytest.mark.tap]
PLAN = LayerPlan((1, 3, 5), 7)
CHUNKS = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
# 12 blocks of 32 tokens and one that vLLM keeps: enough for one longest sample, far too few for all.
FEW_BLOCKS = {"extra": {"num_gpu_blocks_override": 13, "block_size": 32}, "max_model_len": 256}


class AsyncExtractor(Extractor):
    producer_module = "async_producer"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return read_target(make_toy("llama", tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def prompts(target):
    generator = torch.Generator().manual_seed(3)
    return random_prompts(target, torch.randint(2, 200, (64,), generator=generator).tolist())


@pytest.fixture(scope="module")
def alone(target, prompts, tmp_path_factory):
    """Answers and states of each prompt with nothing else in the engine, and what Transformers makes of the first."""
    with extractor(target, PLAN, tmp_path_factory.mktemp("alone"), max_num_seqs=1) as (_, queue):
        samples = collect(queue, prompts, 24)
        made = [(s.token_ids, s.rows()) for s in samples]
    token_ids, rows = made[0]
    reference = reference_states(target.path, token_ids[: len(rows)])[:, [1, 3, 5, 8]]
    assert relative_error(rows, reference).max() < 1e-4
    return made


def wait_for_rows(queue, at_least):
    """Rows that the forward passes have run by now, after the report that covers `at_least`."""
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        producer = queue.stats().producer
        if producer.running == 0 and producer.prefill_tokens + producer.decode_tokens >= at_least:
            break
        time.sleep(0.1)
    return producer.prefill_tokens + producer.decode_tokens


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        pytest.param(Extractor, {}, id="64 mixed requests"),
        pytest.param(Extractor, CHUNKS, id="prompts cut in chunks"),
        pytest.param(Extractor, FEW_BLOCKS, id="preemption"),
        pytest.param(AsyncExtractor, CHUNKS, id="asynchronous, prompts cut in chunks"),
        pytest.param(AsyncExtractor, FEW_BLOCKS, id="asynchronous, preemption"),
    ],
)
def test_a_sample_is_the_same_in_any_company(target, prompts, alone, tmp_path, monkeypatch, kind, engine, runner):
    add_to_python_path(monkeypatch, Path(__file__).parent)  # the producers made for tests
    choose_runner(monkeypatch, runner)
    with extractor(target, PLAN, tmp_path, SamplingOptions(), kind, **engine) as (made, queue):
        assert made.wait_ready().tap == f"aux/{runner}"
        asynchronous = "SCHEDULER AsyncScheduler 2 True" in made.log_path.read_text()
        assert asynchronous == (kind is AsyncExtractor)
        answered = collect(queue, prompts, 24)
        for sample, (token_ids, rows) in zip(answered, alone, strict=True):
            assert sample.token_ids == token_ids, sample.index
            assert relative_error(sample.rows(), rows).max() < 1e-4, sample.index
            sample.release()
        if "num_gpu_blocks_override" in engine.get("extra", {}):
            num_rows = sum(len(rows) for _, rows in alone)
            assert wait_for_rows(queue, num_rows) > num_rows, "nothing was preempted: no row was run twice"
        # The same texts prefilled have the same states, and one more: that of the last token.
        for sample, (token_ids, rows) in zip(collect(queue, [t for t, _ in alone], 0, "val"), alone, strict=True):
            assert sample.num_rows == len(token_ids)
            assert relative_error(sample.rows()[:-1], rows).max() < 1e-4, sample.index
            sample.release()
