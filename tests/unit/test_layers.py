"""Layer ids and their translations."""

import pytest

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.layers import LayerPlan, from_vllm, plan_layers, to_vllm


def test_the_ids_of_a_61_layer_kimi():
    plan = plan_layers([2, 30, 58, 60], 61)
    assert plan == LayerPlan(aux=(2, 30, 58), last=60)
    assert plan.aux_vllm == (3, 31, 59)
    assert plan_layers([3, 31, 59, 61], 61, "vllm") == plan
    assert plan_layers([3, 31, 59], 61, "vllm") == plan


def test_translations_are_inverse():
    assert from_vllm(to_vllm((0, 7, 59))) == (0, 7, 59)


def test_the_default_is_vllms_own():
    assert plan_layers(None, 32).aux_vllm == (2, 16, 29)
    assert plan_layers(None, 30) == LayerPlan(aux=(1, 14, 26), last=29)


@pytest.mark.parametrize(
    ("ids", "num_layers", "convention", "message"),
    [
        ([1, 2], 8, "output", "2 ids were given"),
        ([1, 2, 3, 4, 5], 8, "output", "5 ids were given"),
        ([1, 2, 8], 8, "output", "out of range"),
        ([0, 2, 4], 8, "vllm", "out of range"),
        ([-1, 2, 4], 8, "output", "out of range"),
        ([1, 4, 2], 8, "output", "not ascending"),
        ([1, 1, 2], 8, "output", "not ascending"),
        (None, 6, "output", "at least 8 decoder layers"),
        ([2, 30, 58, 59], 61, "output", "output of layer 59.*in convention vllm it would mean the output of layer 58"),
        ([2, 30, 58, 61], 61, "output", "in convention vllm it would mean the output of layer 60, which is the last"),
        (
            [3, 31, 59, 60],
            61,
            "vllm",
            "output of layer 59.*in convention output it would mean the output of layer 60, which is the last",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(ids, num_layers, convention, message):
    with pytest.raises(ConfigError, match=message):
        plan_layers(ids, num_layers, convention)
