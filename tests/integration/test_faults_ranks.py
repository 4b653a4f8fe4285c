"""Two ranks (gloo on the CPU) with one real vLLM under fire: the run ends in time and leaves nothing, and a resumed one
is the undisturbed one to the last bit, on both ranks.
"""

import os
import signal

import pytest
from fault_support import (
    CHECKPOINT_EVERY,
    NUM_STEPS,
    OUTCOMES,
    Fit,
    assert_same,
    make_material,
    read_position,
)

pytestmark = [pytest.mark.vllm, pytest.mark.faults]
RANKS = ("--trainer.devices=2", "--trainer.strategy=ddp")


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def straight(material, tmp_path_factory):
    """The rows of both ranks of a run that nothing disturbs: each sample once, on one of them."""
    fit = Fit(material, tmp_path_factory.mktemp("straight") / "run", *RANKS).succeed()
    ranks = [fit.rows(rank) for rank in (0, 1)]
    assert [[row[0] for row in rows] for rows in ranks] == [list(range(1, NUM_STEPS + 1))] * 2
    samples = [sample for both in zip(*ranks, strict=True) for _, ids, _ in both for sample in ids]
    assert samples == list(range(len(samples)))
    return ranks


def other_rank(fit):
    """The process that Lightning started for rank 1."""
    (pid,) = [p for p in fit.descendants() if b"LOCAL_RANK=1" in environ(p) and b"\0fit\0" in command(p)]
    return pid


def environ(pid):
    try:
        return open(f"/proc/{pid}/environ", "rb").read()
    except OSError:
        return b""


def command(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return b""


def resume(material, run_dir, straight, step):
    assert read_position(run_dir / "checkpoints" / "last.ckpt")[0] == step
    fit = Fit(material, run_dir, *RANKS, "--ckpt_path=last", name="-resumed").succeed()
    for rank in (0, 1):
        rows = fit.rows(rank)
        assert [row[0] for row in rows] == list(range(step + 1, NUM_STEPS + 1))
        assert_same(rows, straight[rank])
    assert read_position(run_dir / "checkpoints" / "last.ckpt")[0] == NUM_STEPS


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_of_one_rank_and_resume(material, straight, tmp_path, rank):
    """20 steps straight against 10, kill -9, resume, 10."""
    fit = Fit(material, tmp_path / "run", *RANKS)
    fit.wait_for_step(CHECKPOINT_EVERY + 2)
    os.kill(fit.process.pid if rank == 0 else other_rank(fit), signal.SIGKILL)
    status, seconds = fit.finish()
    assert status != 0
    fit.assert_nothing_left()
    for number in (0, 1):
        assert_same(fit.rows(number), straight[number])
    resume(material, tmp_path / "run", straight, CHECKPOINT_EVERY)
    what = f"rank {rank} of 2, SIGKILL"
    OUTCOMES.append((what, "steady state", f"ended after {seconds:.1f} s with {status}; resumed to the bit"))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_rank_0_ends_both_behind_one_step(material, straight, tmp_path, sign):
    fit = Fit(material, tmp_path / "run", *RANKS)
    fit.wait_for_step(3)
    fit.process.send_signal(sign)
    status, seconds = fit.finish()
    assert status == 128 + sign, fit.output()[-3000:]
    assert f"eagle3 fit: ended by {sign.name}" in fit.output()
    fit.assert_nothing_left()
    reached = fit.rows(0)[-1][0]
    assert fit.rows(1)[-1][0] == reached
    resume(material, tmp_path / "run", straight, reached)
    what = f"rank 0 of 2, {sign.name}"
    OUTCOMES.append((what, "steady state", f"ended after {seconds:.1f} s with {status}, last.ckpt; resumed to the bit"))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_rank_0_at_the_start(material, tmp_path, sign):
    fit = Fit(material, tmp_path / "run", *RANKS)
    fit.wait_for_vllm()
    fit.process.send_signal(sign)
    status, seconds = fit.finish()
    assert status == (-sign if sign == signal.SIGKILL else 128 + sign), fit.output()[-3000:]
    fit.assert_nothing_left()
    OUTCOMES.append((f"rank 0 of 2, {sign.name}", "start-up", f"ended after {seconds:.1f} s with {status}"))


def test_vllm_ends_once_every_sample_is_on_disk(material, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join((material / "train.jsonl").read_text().splitlines(keepends=True)[:20]))
    flags = (*RANKS, f"--data.prompts.train=[{few}]", f"--data.cache.dir={tmp_path / 'cache'}")
    fit = Fit(material, tmp_path / "run", *flags)
    fit.wait_for_step(1)
    assert fit.vllm_processes()
    fit.wait_until(lambda: not fit.vllm_processes(), "end of vLLM while the ranks go on")
    fit.succeed()
    again = Fit(material, tmp_path / "again", *flags)
    again.wait_for_step(1)
    assert not (tmp_path / "again" / "vllm.log").exists()
    again.succeed()
    for rank in (0, 1):
        assert [row[0] for row in fit.rows(rank)] == list(range(1, NUM_STEPS + 1))
        assert again.rows(rank) == fit.rows(rank)
    OUTCOMES.append(("2 ranks, every sample on disk", "steady state", "vLLM ended, the run went on to the same losses"))
