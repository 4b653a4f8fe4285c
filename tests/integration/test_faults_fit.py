"""`eagle3 fit` itself under fire: signals, a failing step, a full disk; and what a resume makes of it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from eagle3_lightning.extract.watchdog import group_members

pytestmark = [pytest.mark.vllm, pytest.mark.faults]
SMOLLM2 = Path(__file__).parents[2] / ".cache/target/smollm2-135m"
END_TIMEOUT_S = 30.0
NUM_STEPS = 20


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """The quickstart's target and texts of its tokens, to be prefilled."""
    folder = tmp_path_factory.mktemp("material")
    (folder / "target").symlink_to(SMOLLM2, target_is_directory=True)
    generator = torch.Generator().manual_seed(0)
    with (folder / "train.jsonl").open("w") as out:
        for i in range(400):
            ids = torch.randint(10, 512, (8 + i % 40,), generator=generator).tolist()
            out.write(json.dumps({"ids": ids, "loss_mask": [0] * 3 + [1] * (len(ids) - 3)}) + "\n")
    return folder


class Fit:
    """A running `eagle3 fit`."""

    def __init__(self, material, run_dir, *flags, program="-m eagle3_lightning"):
        self.run_dir = run_dir
        self.temporary = Path(tempfile.mkdtemp(dir="/tmp"))
        self.log = (run_dir.parent / f"{run_dir.name}.log").open("w+")
        environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [
            sys.executable,
            *program.split(),
            "fit",
            f"--run_dir={run_dir}",
            f"--target.path={material / 'target'}",
        ]
        command += [
            f"--data.prompts.train=[{material / 'train.jsonl'}]",
            "--data.prompts.val_fraction=0",
            "--data.sampling.mode=prefill",
            "--data.engine.max_model_len=128",
            "--data.engine.max_num_seqs=16",
            "--data.engine.cpu_threads=1",
            "--data.queue={capacity_tokens: 4096, block_tokens: 16}",
            "--data.batch={pack_tokens: 128, calibration_tokens: 512}",
            "--model.draft={draft_vocab_size: 256}",
            "--model.optim={warmup_steps: 2}",
            "--trainer.accelerator=cpu",
            f"--trainer.max_steps={NUM_STEPS}",
            "--trainer.log_every_n_steps=1",
            "--progress.every_s=0.1",
            "--checkpoint.every_n_train_steps=5",
            *flags,
        ]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=environment)

    def output(self):
        self.log.flush()
        return Path(self.log.name).read_text()

    def wait_for_step(self, step):
        self.wait_until(lambda: any(s >= step for s in self.losses()), f"step {step}")

    def wait_until(self, condition, what, timeout_s=150.0):
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, f"no {what}: {self.output()[-3000:]}"
            time.sleep(0.05)

    def producers(self):
        return Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()

    def losses(self):
        """Loss of each logged step so far."""
        found = {}
        for file in self.run_dir.rglob("metrics.csv"):
            header, *lines = file.read_text().splitlines()
            names = header.split(",")
            for line in lines:
                row = dict(zip(names, line.split(","), strict=False))
                if row.get("train/loss"):
                    found[int(row["step"])] = row["train/loss"]
        return found

    def finish(self, timeout_s=END_TIMEOUT_S):
        started_s = time.monotonic()
        status = self.process.wait(timeout=timeout_s + 60)
        return status, time.monotonic() - started_s

    def assert_nothing_left(self, groups):
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while any(group_members(int(group)) for group in groups) or any(self.temporary.glob("eagle3-*")):
            assert time.monotonic() < deadline_s, [group_members(int(g)) for g in groups]
            time.sleep(0.1)


@pytest.fixture(scope="module")
def straight(material, tmp_path_factory):
    """Losses of a run that nothing disturbs."""
    fit = Fit(material, tmp_path_factory.mktemp("straight") / "run")
    status, _ = fit.finish(timeout_s=200)
    assert status == 0, fit.output()[-3000:]
    return fit.losses()


def resume_equals(material, straight, run_dir):
    """A run that goes on from last.ckpt has the losses of the straight one, to the last digit written."""
    resumed = Fit(material, run_dir, "--ckpt_path=last")
    status, _ = resumed.finish(timeout_s=200)
    assert status == 0, resumed.output()[-3000:]
    losses = resumed.losses()
    assert losses and all(straight[step] == loss for step, loss in losses.items()), (straight, losses)
    assert max(losses) == max(straight)


def test_sigterm_writes_a_checkpoint_and_exits_143_and_the_resume_is_exact(material, straight, tmp_path):
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_step(7)
    groups = fit.producers()
    fit.process.send_signal(signal.SIGTERM)
    status, seconds = fit.finish()
    assert status == 143 and seconds < END_TIMEOUT_S, fit.output()[-3000:]
    fit.assert_nothing_left(groups)
    resume_equals(material, straight, tmp_path / "run")
    print(
        f"| trainer, SIGTERM | steady state | last.ckpt, exit 143 after {seconds:.1f} s; resumed without a difference |"
    )


def test_kill_9_of_the_trainer_and_the_resume_is_exact(material, straight, tmp_path):
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_step(8)
    groups = fit.producers()
    fit.process.kill()
    fit.finish()
    fit.assert_nothing_left(groups)
    resume_equals(material, straight, tmp_path / "run")
    print("| trainer, SIGKILL | steady state | nothing left; resumed from step 5 without a difference |")


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_start_up_ends_the_run(material, tmp_path, sign):
    fit = Fit(material, tmp_path / "run")
    fit.wait_until(lambda: (tmp_path / "run" / "vllm.log").exists(), "vllm.log")
    time.sleep(2)
    groups = fit.producers()
    fit.process.send_signal(sign)
    status, seconds = fit.finish()
    assert status != 0 and seconds < END_TIMEOUT_S, fit.output()[-3000:]
    fit.assert_nothing_left(groups)
    print(f"| trainer, {sign.name} | start-up | exit status {status} after {seconds:.1f} s |")


def test_sigint_in_steady_state_ends_the_run(material, tmp_path):
    fit = Fit(material, tmp_path / "run")
    fit.wait_for_step(3)
    groups = fit.producers()
    fit.process.send_signal(signal.SIGINT)
    status, seconds = fit.finish()
    assert status not in (0, None) and seconds < END_TIMEOUT_S, fit.output()[-3000:]
    fit.assert_nothing_left(groups)
    print(f"| trainer, SIGINT | steady state | exit status {status} after {seconds:.1f} s |")


BROKEN = {
    "exception in the training step": (
        "from eagle3_lightning.module import Eagle3Module as M; step = M.training_step\n"
        "def bad(self, *a):\n    if self.global_step == 4: raise RuntimeError('a step that fails')\n"
        "    return step(self, *a)\n"
        "M.training_step = bad",
        "a step that fails",
    ),
    "full disk at a checkpoint": (
        "import torch; save = torch.save\n"
        "def bad(*a, **k): raise OSError(28, 'No space left on device')\ntorch.save = bad",
        "No space left on device",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_failing_trainer_ends_with_its_reason_and_takes_vllm_with_it(material, tmp_path, name):
    patch, reason = BROKEN[name]
    program = tmp_path / "broken.py"
    program.write_text(f"import sys\n{patch}\nfrom eagle3_lightning.cli import main\nsys.exit(main())\n")
    fit = Fit(material, tmp_path / "run", program=str(program))
    fit.wait_until(lambda: (tmp_path / "run" / "vllm.log").exists(), "vllm.log")
    groups = fit.producers()
    status, _ = fit.finish(timeout_s=150)
    assert status not in (0, None) and reason in fit.output(), fit.output()[-3000:]
    fit.assert_nothing_left(groups)
    print(f"| {name} | steady state | exit status {status}: {reason} |")
