"""`eagle3 fit` under fire, with a real vLLM: kills, signals, a failing step, a full disk, each at the start and in
steady state. It goes on without a lost or repeated sample, or ends within 30 s with a status that is not 0 and the
reason; a resume is the undisturbed run to the last bit; no process, file, socket or shared memory of ours is left.
"""

import os
import signal
import socket
import time
from pathlib import Path

import pytest
from fault_support import (
    CHECKPOINT_EVERY,
    END_TIMEOUT_S,
    NUM_STEPS,
    OUTCOMES,
    Fit,
    assert_same,
    fill,
    make_material,
    read_position,
    small_disk,
)

pytestmark = [pytest.mark.vllm, pytest.mark.faults]
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # engine core and worker as processes of their own
VICTIMS = {"vLLM producer": 0, "vLLM engine core": 1, "vLLM worker": 2}
START, STEADY = "start-up", "steady state"


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def straight(material, tmp_path_factory):
    """The rows of a run that nothing disturbs."""
    rows = Fit(material, tmp_path_factory.mktemp("straight") / "run").succeed().rows()
    assert [row[0] for row in rows] == list(range(1, NUM_STEPS + 1))
    samples = [sample for _, ids, _ in rows for sample in ids]
    assert samples == list(range(len(samples)))
    return rows


def resume(material, run_dir, straight, step):
    """Go on from last.ckpt, which was written behind `step`: the rest of the undisturbed run, bit for bit."""
    assert read_position(run_dir / "checkpoints" / "last.ckpt")[0] == step
    rows = Fit(material, run_dir, "--ckpt_path=last", name="-resumed").succeed().rows()
    assert [row[0] for row in rows] == list(range(step + 1, NUM_STEPS + 1))
    assert_same(rows, straight)
    last = read_position(run_dir / "checkpoints" / "last.ckpt")
    assert last == (NUM_STEPS, straight[-1][1][-1] + 1)


def ended(fit, reason):
    """Seconds and status of an end in time, with its reason, and with nothing left."""
    status, seconds = fit.finish()
    assert status != 0
    assert reason in fit.output(), fit.output()[-3000:]
    fit.assert_nothing_left()
    return f"ended after {seconds:.1f} s with {status}"


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_of_a_part_of_vllm_while_it_starts(material, tmp_path, victim):
    fit = Fit(material, tmp_path / "run", "--data.batch.max_restarts=1", environment=PROCESSES)
    os.kill(fit.wait_for_vllm_process(VICTIMS[victim], victim), signal.SIGKILL)
    outcome = ended(fit, "vLLM's producer")
    assert "The last lines of" in fit.output()
    OUTCOMES.append((f"{victim}, SIGKILL", START, f"{outcome}: reason and end of vllm.log"))


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_of_a_part_of_vllm_with_a_restart_left(material, straight, tmp_path, victim):
    fit = Fit(material, tmp_path / "run", "--data.batch.max_restarts=1", environment=PROCESSES)
    fit.wait_for_step(2)
    assert len(fit.vllm_processes()) == 3
    os.kill(fit.vllm_processes()[VICTIMS[victim]], signal.SIGKILL)
    rows = fit.succeed().rows()
    assert [row[0] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert_same(rows, straight)
    assert "restart 1 of 1" in fit.output()
    OUTCOMES.append((f"{victim}, SIGKILL, a restart left", STEADY, "recovered: same batches, same losses to the bit"))


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_of_a_part_of_vllm_with_no_restart_left(material, tmp_path, victim):
    fit = Fit(material, tmp_path / "run", environment=PROCESSES)
    fit.wait_for_step(2)
    os.kill(fit.vllm_processes()[VICTIMS[victim]], signal.SIGKILL)
    outcome = ended(fit, "vLLM's producer")
    assert "The last lines of" in fit.output()
    OUTCOMES.append((f"{victim}, SIGKILL", STEADY, f"{outcome}: reason and end of vllm.log"))


@pytest.mark.parametrize(("victim", "when"), [("worker", START), ("trainer", START), ("trainer", STEADY)])
def test_kill_9_with_two_tensor_parallel_workers(material, tmp_path, victim, when):
    """The memory over which vLLM's CPU workers sum has a name, which vLLM itself would leave behind."""
    fit = Fit(material, tmp_path / "run", "--data.engine.tensor_parallel_size=2")
    if when == START:
        fit.wait_until(lambda: any("-cpushm_" in name for name in fit.named_memory()), "memory of the workers")
    else:
        fit.wait_for_step(2)
    outcome = "nothing left"
    if victim == "worker":
        os.kill(fit.vllm_processes()[-1], signal.SIGKILL)
        outcome = ended(fit, "vLLM's producer")
    else:
        fit.process.kill()
        fit.finish()
        fit.assert_nothing_left()
    OUTCOMES.append((f"tensor parallel 2: {victim}, SIGKILL", when, outcome))


def test_kill_9_of_the_trainer_at_the_start(material, tmp_path):
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_vllm()
    fit.process.kill()
    fit.finish()
    fit.assert_nothing_left()
    # The directory is not locked or in the way: the next one gets as far.
    again = Fit(material, tmp_path / "run")
    again.wait_for_vllm()
    again.process.kill()
    again.finish()
    again.assert_nothing_left()
    OUTCOMES.append(("trainer, SIGKILL", START, "nothing left; the run directory can be used again"))


def test_kill_9_of_the_trainer_and_resume(material, straight, tmp_path):
    """20 steps straight against 10, kill -9, resume, 10."""
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_step(CHECKPOINT_EVERY + 2)
    fit.process.kill()
    fit.finish()
    fit.assert_nothing_left()
    assert_same(fit.rows(), straight)
    resume(material, tmp_path / "run", straight, CHECKPOINT_EVERY)
    OUTCOMES.append(("trainer, SIGKILL", STEADY, "resumed from step 10: same batches, same losses to the bit"))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_start(material, tmp_path, sign):
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_vllm()
    fit.process.send_signal(sign)
    outcome = ended(fit, f"eagle3 fit: ended by {sign.name}")
    assert fit.process.returncode == 128 + sign
    assert not list((tmp_path / "run").rglob("*.ckpt"))
    OUTCOMES.append((f"trainer, {sign.name}", START, outcome))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_program_is_loaded(material, tmp_path, sign):
    fit = Fit(material, tmp_path / "run")
    fit.wait_until(lambda: b"libtorch" in (Path("/proc") / str(fit.process.pid) / "maps").read_bytes(), "libtorch")
    fit.process.send_signal(sign)
    status, seconds = fit.finish()
    assert status in (-sign, 128 + sign)
    assert "Traceback" not in fit.output()
    assert not (tmp_path / "run").exists()
    fit.assert_nothing_left()
    OUTCOMES.append((f"trainer, {sign.name}", "imports", f"ended after {seconds:.1f} s with {status}"))


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [3, CHECKPOINT_EVERY + 3])
def test_a_signal_writes_a_checkpoint_that_can_be_resumed(material, straight, tmp_path, sign, step):
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_step(step)
    fit.process.send_signal(sign)
    outcome = ended(fit, f"eagle3 fit: ended by {sign.name}")
    assert fit.process.returncode == 128 + sign
    assert_same(fit.rows(), straight)
    reached = fit.rows()[-1][0]
    assert read_position(tmp_path / "run/checkpoints/last.ckpt") == (reached, straight[reached - 1][1][-1] + 1)
    resume(material, tmp_path / "run", straight, reached)
    OUTCOMES.append((f"trainer, {sign.name}", f"{STEADY}, step {reached}", f"{outcome}, last.ckpt; resumed to the bit"))


@pytest.mark.parametrize(("when", "step"), [(START, 0), (STEADY, 4)])
def test_an_exception_in_the_training_step(material, tmp_path, when, step):
    program = tmp_path / "broken.py"
    program.write_text(
        "import sys\nfrom eagle3_lightning.cli import main\nfrom eagle3_lightning.module import Eagle3Module as M\n"
        "good = M.training_step\n"
        "def bad(self, *given):\n"
        f"    if self.global_step == {step}: raise RuntimeError('a step that fails')\n"
        "    return good(self, *given)\n"
        "M.training_step = bad\nsys.exit(main())\n"
    )
    fit = Fit(material, tmp_path / "run", program=str(program))
    fit.wait_for_vllm()
    fit.wait_until(lambda: "a step that fails" in fit.output() or fit.process.poll() is not None, "failure")
    outcome = ended(fit, "RuntimeError: a step that fails")
    OUTCOMES.append(("exception in the training step", f"{when}, step {step + 1}", f"{outcome}: traceback"))


def test_a_disk_that_is_full_from_the_start(material, tmp_path):
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        fit = Fit(material, disk / "run")
        outcome = ended_soon(fit, "No space left on device")
        assert "Traceback" not in fit.output()
    OUTCOMES.append(("full disk", START, f"{outcome}, one line"))


def test_a_disk_too_small_for_the_first_checkpoint(material, tmp_path):
    with small_disk(tmp_path / "run" / "checkpoints", "64k") as disk:
        fit = Fit(material, tmp_path / "run", "--checkpoint.every_n_train_steps=1")
        outcome = ended_soon(fit, "No space left on device")
        assert "Traceback" not in fit.output()
        assert list(disk.rglob("*")) == []
    OUTCOMES.append(("full disk at checkpoint", f"{START}, first", f"{outcome}, one line, nothing torn"))


def test_a_disk_that_fills_up_keeps_the_earlier_checkpoint(material, straight, tmp_path):
    with small_disk(tmp_path / "run" / "checkpoints", "64m") as disk:
        fit = Fit(material, tmp_path / "run")
        fit.wait_for_step(CHECKPOINT_EVERY + 1)
        filler = fill(disk)
        outcome = ended_soon(fit, "No space left on device")
        assert "Traceback" not in fit.output()
        assert not list(disk.glob(".*"))
        filler.unlink()
        resume(material, tmp_path / "run", straight, CHECKPOINT_EVERY)
    OUTCOMES.append(("full disk at checkpoint", STEADY, f"{outcome}, one line; resumed from the one before to the bit"))


def test_sigterm_on_a_full_disk(material, tmp_path):
    with small_disk(tmp_path / "run" / "checkpoints", "64k") as disk:
        fit = Fit(material, tmp_path / "run")
        fit.wait_for_step(3)
        fill(disk)
        fit.process.terminate()
        outcome = ended(fit, "No space left on device")
        assert fit.process.returncode == 143
    OUTCOMES.append(("trainer, SIGTERM on a full disk", STEADY, f"{outcome}, says that nothing was written"))


def test_a_wandb_server_that_cannot_be_reached(material, straight, tmp_path):
    with socket.socket() as closed:  # bound, not listening: a connection is refused
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        account = {"WANDB_MODE": "online", "WANDB_API_KEY": "x" * 40, "WANDB_BASE_URL": url}
        fit = Fit(material, tmp_path / "run", "--trainer.logger=WandbLogger", environment=account).succeed()
    assert_same(fit.rows(), straight)
    assert len(fit.rows()) == NUM_STEPS
    (line,) = [line for line in fit.output().splitlines() if "this run is logged offline" in line]
    assert url in line
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert file.stat().st_size > 0
    OUTCOMES.append(("W&B server unreachable", START, "went on offline, said so; same losses to the bit"))


def ended_soon(fit, reason):
    """The end of a run that comes upon its fault by itself: counted from its last step, or else from its start."""
    fit.process.wait(timeout=240)
    last = Path(f"{fit.record}.rank0")
    seconds = time.time() - (last.stat().st_mtime if last.exists() else fit.started_s)
    assert seconds < END_TIMEOUT_S
    ended(fit, reason)
    return f"ended after {seconds:.1f} s with {fit.process.returncode}"


def test_a_second_fit_is_refused_while_the_first_starts_and_while_it_runs(material, tmp_path):
    first = Fit(material, tmp_path / "run")
    first.wait_until(lambda: (tmp_path / "run" / ".lock").exists(), ".lock")
    try:
        for when in (START, STEADY):
            first.process.send_signal(signal.SIGSTOP)  # it is as far as this, however long the second takes
            before = sorted(path for path in (tmp_path / "run").iterdir())
            second = Fit(material, tmp_path / "run", "--ckpt_path=last" if when == STEADY else "--seed_everything=1")
            second.process.wait(240)
            lines = [line for line in second.output().splitlines() if "another run is using it" in line]
            assert second.process.returncode == 2
            assert len(lines) == 1
            assert f"process {first.process.pid} " in lines[0]
            assert "Traceback" not in second.output()
            assert set(before) <= set((tmp_path / "run").iterdir())
            assert not (tmp_path / "run" / "config_2.yaml").exists()
            second.assert_nothing_left()
            OUTCOMES.append(("a second fit in the directory", f"{when} of the first", "refused in one line with 2"))
            first.process.send_signal(signal.SIGCONT)
            if when == START:
                first.wait_for_step(CHECKPOINT_EVERY + 1)
    finally:
        first.process.send_signal(signal.SIGCONT)
        first.succeed()
    assert not (tmp_path / "run" / ".lock").exists()
