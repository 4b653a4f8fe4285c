"""Captured states of every kind of target, as a toy with random weights, against Transformers in float32."""

import pytest
from extract_support import collect, extractor, random_prompts, read_target, reference_states, relative_error
from toy_targets import ALL, make_toy

from eagle3_lightning.layers import plan_layers

pytestmark = [pytest.mark.vllm, pytest.mark.tap]
LENGTHS = (3, 9, 33, 120)
TOLERANCE = 2e-4  # one layer off gives more than 0.1


@pytest.mark.parametrize("name", ALL)
def test_states_of_a_toy_are_those_of_transformers(name, tmp_path):
    info = read_target(make_toy(name, tmp_path / "target"))
    plan = plan_layers([2, 30, 58, 60] if name.startswith("kimi") else None, info.num_layers)
    # The log-probabilities in the self-check have the head's logits scaled or capped as the target does.
    with extractor(info, plan, tmp_path, max_num_seqs=8) as (made, queue):
        samples = collect(queue, random_prompts(info, LENGTHS), 16)
        samples += collect(queue, [s.token_ids for s in samples], 0, "val")
        worst = 0.0
        for sample in samples:
            reference = reference_states(info.path, sample.token_ids[: sample.num_rows])
            error = relative_error(sample.rows(), reference[:, [*plan.aux, -1]])
            assert error.max() < TOLERANCE, (sample.index, error)
            worst = max(worst, float(error.max()))
            sample.release()
        print(f"| {name} | {made.wait_ready().tap} | {worst:.1e} |")
