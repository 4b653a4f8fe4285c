"""Two ranks: every sample to exactly one of them, equal steps, an exact resume. Toy engine, real queue."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from toy_target import make_target

NUM_PROMPTS = 31


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    make_target(directory / "target")
    rows = [{"prompt": f"count to {i}", "response": "x" * (4 + i % 13)} for i in range(NUM_PROMPTS)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def run(place, name, max_steps, accumulate, checkpoint=None, prompts="prompts.jsonl", **variables):
    prompts = prompts if prompts == "self" else place / prompts
    arguments = [place / "target", prompts, place / name, max_steps, accumulate]
    arguments += [checkpoint] if checkpoint else []
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        **variables,
    }
    environment = {name: value for name, value in environment.items() if value is not None}
    script = Path(__file__).with_name("ranks_run.py")
    command = [sys.executable, script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads((place / name / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module", params=[1, 2])
def whole(request, place):
    return request.param, run(place, f"whole{request.param}", 9, request.param)


def test_each_sample_goes_to_one_rank_in_rounds(whole):
    _, ranks = whole
    assert ranks[0]["steps"].keys() == ranks[1]["steps"].keys()
    assert len(ranks[0]["steps"]) == 9
    packs = []
    for step in sorted(ranks[0]["steps"], key=int):
        here, there = (ranks[r]["steps"][step] for r in (0, 1))
        assert len(here) == len(there)
        packs += [pack for both in zip(here, there, strict=True) for pack in both]
    seen = [i for pack in packs for i in pack]
    assert seen == list(range(len(seen)))
    assert len(seen) > NUM_PROMPTS  # the run crosses an epoch
    assert all(len({i // NUM_PROMPTS for i in pack}) <= 1 for pack in packs)
    assert [] in packs  # and fills its last round with padding


def test_ranks_calibrate_alike(whole):
    _, ranks = whole
    assert ranks[0]["calibration"] == ranks[1]["calibration"]
    assert ranks[0]["calibration"][0] > 0


def test_a_resumed_run_goes_on_where_it_stood(place, whole):
    accumulate, ranks = whole
    at = 3 + accumulate
    part = run(place, f"part{accumulate}-{at}", 9, accumulate, place / f"whole{accumulate}/ckpt/step={at}.ckpt")
    for rank in (0, 1):
        assert part[rank]["steps"] == {step: ids for step, ids in ranks[rank]["steps"].items() if int(step) >= at}
        assert part[rank]["weight"] == ranks[rank]["weight"]


def test_vllm_ends_when_all_samples_are_on_disk_and_no_rank_sees_a_difference(place):
    plain = run(place, "plain", 24, 1)
    kept = run(place, "kept", 24, 1, CACHE_DIR=str(place / "cache"))
    for rank in (0, 1):
        assert kept[rank]["steps"] == plain[rank]["steps"]
        assert kept[rank]["weight"] == plain[rank]["weight"]
    runs = kept[0]["engine_runs"]
    assert all(plain[0]["engine_runs"])
    assert runs[0]
    assert not runs[-1]
    assert max(i for ids in kept[0]["steps"].values() for pack in ids for i in pack) > 2 * NUM_PROMPTS
    again = run(place, "again", 24, 1, CACHE_DIR=str(place / "cache"))
    assert not any(again[0]["engine_runs"])
    assert [again[rank]["weight"] for rank in (0, 1)] == [plain[rank]["weight"] for rank in (0, 1)]


def test_rank_0_has_prompts_written_and_both_train_on_the_answers(place):
    """With one engine; the other rank joins its queue when they are there."""
    ranks = run(place, "own", 9, 1, prompts="self")
    texts = [json.loads(line)["messages"] for line in (place / "own/self_prompts.jsonl").read_text().splitlines()]
    assert len(texts) == NUM_PROMPTS
    assert [record["num_engines"] for record in ranks] == [1, 0]
    assert ranks[0]["calibration"] == ranks[1]["calibration"]
    assert ranks[0]["weight"] == ranks[1]["weight"]
    seen = [i for step in ranks[0]["steps"] for rank in ranks for pack in rank["steps"][step] for i in pack]
    assert len(ranks[0]["steps"]) == len(ranks[1]["steps"]) == 9
    assert seen == sorted(set(seen))
    assert len(seen) > NUM_PROMPTS / 2
    (place / "own/hub").unlink()  # the toy's, which has no supervisor to clean up behind it
    again = run(place, "own", 9, 1, prompts="self")
    assert [record["steps"] for record in again] == [record["steps"] for record in ranks]


def test_ranks_share_the_cores_that_vllm_leaves(place):
    """Lightning sets the variable on rank 0 behind the start of the others; it is not taken for the user's."""
    cores = len(os.sched_getaffinity(0))
    ranks = run(place, "threads", 1, 1, OMP_NUM_THREADS=None)
    assert [rank["threads"] for rank in ranks] == [max(1, cores // 2 // 2)] * 2
    ranks = run(place, "given", 1, 1, OMP_NUM_THREADS=str(cores))
    assert [rank["threads"] for rank in ranks] == [cores, cores]
