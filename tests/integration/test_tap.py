"""Captured states of SmolLM2 against Transformers in float32: every layer, both modes, bfloat16 and float32."""

import pytest
import torch
from extract_support import (
    SMOLLM2,
    all_layers,
    check_states,
    choose_runner,
    collect,
    extractor,
    read_target,
    reference_states,
    relative_error,
)
from toy_targets import make_toy

from eagle3_lightning.target import load_lm_head

pytestmark = pytest.mark.vllm

QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
]


@pytest.fixture(scope="module")
def prompts():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in QUESTIONS
    ]


def make_samples(prompts, dtype, run_dir):
    """Each prompt answered greedily; then the same texts prefilled."""
    info = read_target(SMOLLM2)
    with extractor(info, all_layers(info), run_dir, dtype=dtype) as (_, queue):
        answered = collect(queue, prompts, 64)
        prefilled = collect(queue, [s.token_ids for s in answered], 0, "val")
        return [(s.token_ids[: s.num_rows], s.rows()) for s in answered + prefilled]


def teacher_tokens(last):
    return (last.float() @ load_lm_head(read_target(SMOLLM2)).float().T).argmax(dim=1)


def captured_and_reference(samples):
    for token_ids, rows in samples:
        reference = reference_states(SMOLLM2, token_ids)
        # The reference has the last layer before and after the final norm; what is captured is the one after it.
        yield rows, torch.cat([reference[:, :-2], reference[:, -1:]], dim=1)


def test_float32_states_are_those_of_transformers(prompts, tmp_path):
    agree = []
    for rows, reference in captured_and_reference(make_samples(prompts, "float32", tmp_path)):
        error = relative_error(rows[1:], reference[1:])  # without the attention sink, whose norm hides the others
        assert error.max() < 1e-4, error
        agree.append(teacher_tokens(rows[:, -1]) == teacher_tokens(reference[:, -1]))
    assert torch.cat(agree).all()


def test_bfloat16_states_are_those_of_transformers_but_for_rounding(prompts, tmp_path):
    agree = []
    for rows, reference in captured_and_reference(make_samples(prompts, "bfloat16", tmp_path)):
        error = relative_error(rows, reference)
        agree.append(teacher_tokens(rows[:, -1]) == teacher_tokens(reference[:, -1]))
        assert error[:-2].max() < 0.02, error
        assert error[-2:].max() < 0.04, error
    assert torch.cat(agree).float().mean() >= 0.99


def test_the_v2_runner_hands_out_the_same(tmp_path, monkeypatch):
    choose_runner(monkeypatch, "v2")
    info = read_target(make_toy("llama", tmp_path / "target"))
    assert check_states(info, all_layers(info), tmp_path, lengths=(3, 33, 120)) == "aux/v2"
