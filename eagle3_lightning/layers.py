"""Layer ids: one convention inside, translations at the borders.

Inside this project, a layer id is the 0-based index of the decoder layer whose *output* is meant, so the last layer of
a model with N layers is N - 1. vLLM and the speculators format count the layers already run: their id k is the residual
stream after k layers, which is the output of our layer k - 1. Transformers' `hidden_states[i + 1]` is the output of our
layer i, but its last entry is usually normed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3_lightning.errors import ConfigError

Convention = Literal["output", "vllm"]
NUM_AUX_LAYERS = 3
OPTION = "target.layers"


@dataclass(frozen=True)
class LayerPlan:
    """The layers that are captured, in our convention (0-based, output of the layer).

    Attributes:
        aux: the three auxiliary layers, ascending; their outputs are fused into the draft's input.
        last: the last decoder layer; its output, after the final norm, is the teacher's input to the lm_head.
    """

    aux: tuple[int, ...]
    last: int

    @property
    def aux_vllm(self) -> tuple[int, ...]:
        """The auxiliary layers as vLLM and the speculators format number them."""
        return to_vllm(self.aux)


def to_vllm(ids: Sequence[int]) -> tuple[int, ...]:
    """Our ids (output of layer i) as vLLM's (residual stream after i + 1 layers)."""
    return tuple(i + 1 for i in ids)


def from_vllm(ids: Sequence[int]) -> tuple[int, ...]:
    """vLLM's ids (residual stream after k layers) as ours (output of layer k - 1)."""
    return tuple(i - 1 for i in ids)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """vLLM's own default, (2, N // 2, N - 3) in its numbers, expressed in ours."""
    return from_vllm((2, num_layers // 2, num_layers - 3))


def plan_layers(ids: Sequence[int] | None, num_layers: int, convention: Convention = "output") -> LayerPlan:
    """Check the user's layer ids and bring them into our convention.

    Args:
        ids: None for the default; three auxiliary ids; or four, the last of which must be the last layer.
        num_layers: decoder layers N of the target.
        convention: what the numbers mean: `output` (0-based layer outputs, last is N - 1) or `vllm` (layers already
            run, last is N).

    Raises:
        ConfigError: a wrong number of ids, ids out of range or not ascending, a fourth id that is not the last.
    """
    last = num_layers - 1
    if ids is None:
        aux = default_aux_layers(num_layers)
        if not 0 <= aux[0] < aux[1] < aux[2] <= last:
            raise ConfigError(
                OPTION,
                None,
                f"the default needs at least 8 decoder layers and the target has {num_layers}",
                "Name three layers, for example --target.layers '[0,1,2]'.",
            )
        return LayerPlan(aux, last)
    given = list(ids)
    ours = tuple(given) if convention == "output" else from_vllm(given)
    lowest = 0 if convention == "output" else 1
    highest = last if convention == "output" else num_layers
    if len(ours) not in (NUM_AUX_LAYERS, NUM_AUX_LAYERS + 1):
        raise ConfigError(
            OPTION,
            given,
            f"{len(given)} ids were given",
            "Give three auxiliary layers, or four of which the fourth is the last layer.",
        )
    if any(i < 0 or i > last for i in ours[:NUM_AUX_LAYERS]):
        raise ConfigError(
            OPTION,
            given,
            f"an id is out of range for a target of {num_layers} layers",
            f"With layer_convention={convention} ids go from {lowest} to {highest}.",
        )
    if any(a >= b for a, b in itertools.pairwise(ours)):
        raise ConfigError(OPTION, given, "the ids are not ascending", "Sort them and name each layer once.")
    if len(ours) == NUM_AUX_LAYERS + 1 and ours[-1] != last:
        raise ConfigError(
            OPTION,
            given,
            _fourth_id_problem(given[-1], num_layers, convention),
            "Give three ids and the last layer is added, or end the list with the last layer.",
        )
    return LayerPlan(ours[:NUM_AUX_LAYERS], last)


def _fourth_id_problem(given: int, num_layers: int, convention: Convention) -> str:
    other, meaning = ("vllm", given - 1) if convention == "output" else ("output", given)
    ours = given if convention == "output" else given - 1
    hint = ", which is the last" if meaning == num_layers - 1 else ""
    return (
        f"the fourth id must be the last of {num_layers} layers, and {given} means the output of layer {ours} "
        f"(0-based) in convention {convention}; in convention {other} it would mean the output of layer {meaning}{hint}"
    )
