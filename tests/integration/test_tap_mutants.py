"""Faults put into the tap on purpose: the self-check stops the run, or the row checks drop what is wrong."""

import pytest
from extract_support import (
    SMOLLM2,
    Extractor,
    add_to_python_path,
    choose_runner,
    collect_all,
    extractor,
    random_prompts,
    read_target,
)

from eagle3_lightning.errors import ProducerError
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.stream.messages import Dropped

pytestmark = [pytest.mark.vllm, pytest.mark.tap]
PLAN = LayerPlan((2, 15, 28), 29)  # the third is the one before the last: the hardest to tell from it


class MutantExtractor(Extractor):
    producer_module = "mutant_producer"


SELF_CHECK = {
    "shift 0 -1": "output of layer 2 does not depend on the last norm of that layer",
    "shift 1 -1": "output of layer 15 does not depend on the last norm of that layer",
    "shift 2 -1": "output of layer 28 does not depend on the last norm of that layer",
    "shift 0 1": "output of layer 2 depends on layer 3",
    "shift 1 1": "output of layer 15 depends on layer 16",
    "shift 2 1": "output of layer 28 depends on layer 29",
    "last layer one short": "not the output of layer 29 after one final norm",
    "norm twice": "not the output of layer 29 after one final norm",
    "no norm": "not the output of layer 29 after one final norm",
    "rows one position late": "not the output of layer 29 after one final norm",
    "rows of two requests swapped": "not the output of layer 29 after one final norm",
    "rows and ids of two requests swapped": "token_mismatch in generate mode",
    "chunk dropped": "row_mismatch in generate mode",
    "not finite": "non_finite in generate mode",
}


@pytest.fixture
def mutant(monkeypatch):
    def choose(name):
        monkeypatch.setenv("EAGLE3_MUTANT", name)
        monkeypatch.syspath_prepend(str(SMOLLM2.parents[2] / "tests/integration"))
        add_to_python_path(monkeypatch, SMOLLM2.parents[2] / "tests/integration")

    return choose


ON_V2 = ["shift 1 1", "no norm", "rows of two requests swapped", "chunk dropped"]


@pytest.mark.parametrize(("name", "runner"), [(n, "v1") for n in SELF_CHECK] + [(n, "v2") for n in ON_V2])
def test_the_self_check_stops_the_run(mutant, name, runner, tmp_path, monkeypatch):
    choose_runner(monkeypatch, runner)
    mutant(name)
    with pytest.raises(ProducerError) as stopped, extractor(read_target(SMOLLM2), PLAN, tmp_path, kind=MutantExtractor):
        pass
    first = str(stopped.value).splitlines()[0]
    assert "self-check" in first and SELF_CHECK[name] in first
    assert ("Using V2 Model Runner" in (tmp_path / "vllm.log").read_text()) == (runner == "v2")
    print(f"| {name} | {first[first.index('self-check') :]} |")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("rows and ids of two requests swapped later", "token_mismatch"),
        ("chunk dropped later", "row_mismatch"),
        ("not finite later", "non_finite"),
    ],
)
def test_the_row_checks_drop_what_goes_wrong_later(mutant, name, reason, tmp_path):
    mutant(name)
    info = read_target(SMOLLM2)
    with extractor(info, PLAN, tmp_path, kind=MutantExtractor) as (_, queue):
        items = collect_all(queue, random_prompts(info, [5 + i for i in range(12)]), 8)
        dropped = [item for item in items if isinstance(item, Dropped)]
        assert dropped and {item.reason for item in dropped} == {reason}
        assert queue.stats().dropped == {reason: len(dropped)}
    print(f"| {name} | {len(dropped)} of 12 samples dropped as {reason} |")
