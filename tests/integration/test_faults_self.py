"""`eagle3 fit`, disturbed while its target writes prompts: it goes on where a restart is left, or ends within 30 s with
the reason, and nothing is left behind.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from fault_support import OUTCOMES, Fit

from eagle3_lightning.extract.watchdog import group_members

SMOLLM2 = Path(__file__).parents[2] / ".cache/target/smollm2-135m"
pytestmark = [pytest.mark.vllm, pytest.mark.faults]
WRITING = "prompts are written"
NUM_PROMPTS = 40
STARTED = "eagle3: self-check passed"  # in vllm.log, once for each start of vLLM
FLAGS = (
    f"--target.path={SMOLLM2}",
    "--data.prompts.train=self",
    f"--data.prompts.synthesis={{num_prompts: {NUM_PROMPTS}, max_tokens: 64}}",
    "--data.sampling={mode: generate, max_new_tokens: 16}",
    "--data.engine.max_model_len=160",
    "--data.engine.enforce_eager=true",
    "--data.queue={capacity_tokens: 8192, block_tokens: 16}",
    "--data.batch.pack_tokens=256",
    "--trainer.max_steps=4",
)


@pytest.fixture
def writing(tmp_path):
    """A run whose vLLM has begun to write."""

    def start(*flags):
        fit = Fit(tmp_path, tmp_path / "run", *FLAGS, *flags)
        log = tmp_path / "run/vllm.log"
        fit.wait_until(lambda: log.exists() and STARTED in log.read_text(), "prompts being written")
        assert not (tmp_path / "run/self_prompts.jsonl").exists()
        return fit

    return start


def assert_trained(fit):
    rows = (fit.run_dir / "self_prompts.jsonl").read_text().splitlines()
    assert [json.loads(row)["id"] for row in rows] == [f"self-{number}" for number in range(NUM_PROMPTS)]
    samples = [sample for _, ids, _ in fit.rows() for sample in ids]
    assert samples == list(range(len(samples)))
    assert "Traceback" not in fit.output()
    return json.loads((fit.run_dir / "summary.json").read_text())


def test_kill_9_of_the_producer_while_it_writes_with_no_restart_left(writing):
    fit = writing()
    os.kill(fit.vllm_processes()[0], signal.SIGKILL)
    status, seconds = fit.finish()
    assert status == 1
    assert "vLLM's producer" in fit.output() and "The last lines of" in fit.output()
    assert not (fit.run_dir / "self_prompts.jsonl").exists()
    fit.assert_nothing_left()
    OUTCOMES.append(("vLLM producer, SIGKILL", WRITING, f"ended after {seconds:.1f} s with 1: reason, end of vllm.log"))


def test_kill_9_of_the_producer_while_it_writes_with_a_restart_left(writing):
    fit = writing("--data.batch.max_restarts=1")
    os.kill(fit.vllm_processes()[0], signal.SIGKILL)
    fit.succeed()
    assert (fit.run_dir / "vllm.log").read_text().count(STARTED) == 2
    assert assert_trained(fit)["producer_restarts"] == 1
    OUTCOMES.append(("vLLM producer, SIGKILL, a restart left", WRITING, "recovered: all prompts, one more start"))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_they_are_written(writing, sign):
    fit = writing()
    (group,) = {os.getpgid(pid) for pid in fit.vllm_processes()}
    fit.process.send_signal(sign)
    status, seconds = fit.finish()
    assert status == 128 + sign
    assert f"eagle3 fit: ended by {sign.name}" in fit.output()
    assert not (fit.run_dir / "self_prompts.jsonl").exists()
    assert not list(group_members(group))
    fit.assert_nothing_left()
    again = Fit(fit.run_dir.parent, fit.run_dir, *FLAGS, name="-again").succeed()
    assert (fit.run_dir / "vllm.log").read_text().count(STARTED) == 2  # one for each run
    assert_trained(again)
    OUTCOMES.append((f"trainer, {sign.name}", WRITING, f"ended after {seconds:.1f} s with {status}; begun anew"))


def test_kill_9_of_the_trainer_while_they_are_written(writing):
    fit = writing()
    fit.process.kill()
    fit.finish()
    fit.assert_nothing_left()
    OUTCOMES.append(("trainer, SIGKILL", WRITING, "nothing left"))


def test_kill_9_of_the_producer_while_another_rank_waits_for_the_prompts(writing):
    fit = writing("--trainer.devices=2", "--trainer.strategy=ddp")
    os.kill(fit.vllm_processes()[0], signal.SIGKILL)
    status, seconds = fit.finish()
    assert status == 1
    assert "vLLM's producer" in fit.output() and "The last lines of" in fit.output()
    fit.assert_nothing_left()
    OUTCOMES.append(("2 ranks: vLLM producer, SIGKILL", WRITING, f"ended after {seconds:.1f} s with 1: reason"))


def test_two_ranks_train_on_the_answers_to_prompts_of_a_producer_that_was_killed(writing):
    fit = writing("--trainer.devices=2", "--trainer.strategy=ddp", "--data.batch.max_restarts=1")
    os.kill(fit.vllm_processes()[0], signal.SIGKILL)
    fit.succeed()
    rows = (fit.run_dir / "self_prompts.jsonl").read_text().splitlines()
    assert len(rows) == NUM_PROMPTS
    ranks = [fit.rows(rank) for rank in (0, 1)]
    samples = [sample for both in zip(*ranks, strict=True) for _, ids, _ in both for sample in ids]
    assert samples == sorted(set(samples))
    OUTCOMES.append(("2 ranks: vLLM producer, SIGKILL, a restart left", WRITING, "recovered: all prompts"))
