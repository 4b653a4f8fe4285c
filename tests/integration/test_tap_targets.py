"""Captured states of every kind of target, as a toy with random weights, against Transformers in float32."""

import pytest
from extract_support import check_states, read_target
from toy_targets import ALL, make_toy

from eagle3_lightning.layers import plan_layers

pytestmark = [pytest.mark.vllm, pytest.mark.tap]


@pytest.mark.parametrize("name", ALL)
def test_states_of_a_toy_are_those_of_transformers(name, tmp_path):
    info = read_target(make_toy(name, tmp_path / "target"))
    plan = plan_layers([2, 30, 58, 60] if name.startswith("kimi") else None, info.num_layers)
    # The log-probabilities in the self-check have the head's logits scaled or capped as the target does.
    check_states(info, plan, tmp_path, lengths=(3, 9, 33, 120))
