"""Draft vocabulary, feature scale and rotary tables."""

import math

import pytest
import torch

from eagle3_lightning.draft.rope import Rope
from eagle3_lightning.draft.vocab import Calibration, Calibrator, choose_draft_vocab, coverage
from eagle3_lightning.errors import ConfigError, SampleError


def calibration(response: list[int], prompt: list[int]) -> Calibration:
    return Calibration(torch.tensor(response), torch.tensor(prompt), torch.ones(3, 2), sum(response) + sum(prompt))


def chosen(d2t: torch.Tensor) -> list[int]:
    return (d2t + torch.arange(len(d2t))).tolist()


def test_responses_and_prompts_count_together_and_ties_go_to_the_smaller_id() -> None:
    cal = calibration([0, 5, 1, 0, 0, 1], [0, 0, 1, 3, 0, 1])
    assert chosen(choose_draft_vocab(cal, 2)) == [1, 3]
    assert chosen(choose_draft_vocab(cal, 3)) == [1, 2, 3]  # 2 and 5 were both seen twice
    assert chosen(choose_draft_vocab(cal, 5)) == [0, 1, 2, 3, 5]  # none seen: 0 before 4


def test_tokens_that_end_a_turn_are_always_in() -> None:
    cal = calibration([9, 5, 1, 0], [0, 0, 0, 0])
    assert chosen(choose_draft_vocab(cal, 2, always=(3,))) == [0, 3]
    with pytest.raises(ConfigError, match="draft_vocab_size = 1"):
        choose_draft_vocab(cal, 1, always=(2, 3))
    with pytest.raises(ConfigError, match="draft_vocab_size = 5"):
        choose_draft_vocab(cal, 5)


def test_special_tokens_are_always_in() -> None:
    calibrator = Calibrator(6, 1, 2, special_ids=(4, 5, 900))  # a tokenizer may know ids that the model has no row for
    calibrator.add([0, 0, 1, 2], [(1, 4)], torch.ones(4, 1, 2))
    assert chosen(choose_draft_vocab(calibrator.result(), 3)) == [0, 4, 5]
    with pytest.raises(ConfigError, match="must lie between 3"):
        choose_draft_vocab(calibrator.result(), 2, always=(3,))


def counted(samples: list[list[int]], prompt: list[int]) -> Calibration:
    """Of samples that have this prompt before a supervised answer each."""
    calibrator = Calibrator(20, 1, 2)
    for answer in samples:
        ids = [*prompt, *answer]
        calibrator.add(ids, [(len(prompt), len(ids))], torch.ones(len(ids), 1, 2))
    return calibrator.result()


def test_coverage_is_of_samples_that_had_no_part_in_the_choice() -> None:
    """Each answer has a token that no other has; a vocabulary chosen of all of them would hold every one."""
    cal = counted([[0, 0, 1, 2 + n % 10] if n % 10 == 9 else [0, 0, 1] for n in range(30)], prompt=[12, 13])
    assert set(chosen(choose_draft_vocab(cal, 5))) == {0, 1, 11, 12, 13}
    found = coverage(cal, 5)
    assert (found.num_tokens, found.num_samples) == (12, 3)
    assert found.share == pytest.approx(9 / 12)  # without the 11s, and prompts are not counted
    assert found.sentence(5) == (
        "the draft vocabulary of 5 tokens holds about 75.00% of supervised text: measured on 12 tokens of every 10th "
        "of the first samples (3 of them), with these left out of the choice"
    )
    assert coverage(cal, 5, always=(11,)).share == 1.0


def test_coverage_of_few_samples_is_not_known() -> None:
    cal = counted([[0, 1, 2]] * 29, prompt=[3])
    found = coverage(cal, 4)
    assert math.isnan(found.share)
    assert found.sentence(4) == (
        "how much of other text the draft vocabulary of 4 tokens holds is not known: it takes 30 samples to measure "
        "it, and there were fewer"
    )
    assert math.isnan(coverage(calibration([6, 2], [0, 0]), 2).share)


def test_calibrator_counts_spans_and_leaves_the_first_position_out() -> None:
    calibrator = Calibrator(vocab_size=5, num_aux=3, hidden_size=2)
    aux = torch.full((3, 3, 2), 2.0)
    aux[0] = 24960.0  # the attention sink
    aux[2, 1, 0] = 4.0
    calibrator.add([1, 2, 3, 3], [(2, 4)], aux)
    calibrator.add([4], [], torch.full((1, 3, 2), 100.0))
    result = calibrator.result()
    assert result.prompt_counts.tolist() == [0, 1, 1, 0, 1]
    assert result.response_counts.tolist() == [0, 0, 0, 2, 0]
    assert result.num_tokens == 5
    expected = torch.full((3, 2), 2.0)
    expected[1, 0] = ((4.0 + 16.0) / 2) ** 0.5
    torch.testing.assert_close(result.feature_rms, expected)


def test_nothing_to_calibrate_on_and_nan_are_refused() -> None:
    calibrator = Calibrator(5, 3, 2)
    with pytest.raises(ConfigError, match="calibration_tokens"):
        calibrator.result()
    with pytest.raises(SampleError, match="not finite"):
        calibrator.add([1, 2], [], torch.full((2, 3, 2), float("nan")))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 50000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    ],
    ids=["default", "partial", "linear", "llama3", "yarn_mscale", "yarn"],
)
def test_frequencies_are_those_of_transformers(rope: dict[str, object]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=dict(rope), max_position_embeddings=131072
    )
    ours = Rope(rope, 64, 131072)  # type: ignore[arg-type]
    if rope["rope_type"] == "default":
        dim = ours.rotary_dim
        wanted, amplitude = 1.0 / 10000.0 ** (torch.arange(0, dim, 2).float() / dim), 1.0
    else:
        wanted, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    assert len(ours.inv_freq) == int(64 * rope.get("partial_rotary_factor", 1.0)) // 2  # type: ignore[call-overload]
    torch.testing.assert_close(ours.inv_freq.float(), wanted, rtol=1e-5, atol=1e-12)
    assert ours.amplitude == pytest.approx(amplitude)


def test_an_unknown_rotary_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="longrope"):
        Rope({"rope_type": "longrope"}, 64, 4096)
