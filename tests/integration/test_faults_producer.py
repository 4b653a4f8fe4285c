"""The extractor alone, without a trainer: a killed engine ends it with the reason, restarts lose and repeat no sample,
and nothing is left. `make test` runs the first of these; what `eagle3 fit` makes of it is in test_faults_fit.py.
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from extract_support import read_target
from fault_support import OUTCOMES, new_shared_memory, read_command
from toy_targets import make_toy

from eagle3_lightning.extract.watchdog import group_members

pytestmark = pytest.mark.vllm
slow = pytest.mark.faults  # `make test` runs one kill, `make test-faults` all of them
NUM_SAMPLES = 400
END_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = make_toy("llama", tmp_path_factory.mktemp("toy"))
    read_target(path)
    return path


class FitSide:
    """A running fit_side.py with engine core and worker as processes of their own."""

    def __init__(self, target, tmp_path, max_restarts=0, num_samples=NUM_SAMPLES, multiprocessing="1"):
        self.temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own is too long for sockets
        self.shared_before = set(os.listdir("/dev/shm"))
        environment = {**os.environ, "TMPDIR": str(self.temporary), "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("fit_side.py")),
                str(target),
                str(tmp_path),
                str(num_samples),
                str(max_restarts),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self.group = int(self.wait_for("producer ").split()[1])

    def wait_for(self, start):
        """Read on until a line begins so."""
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(start):
                return line
        raise AssertionError(f"no {start!r} in {self.lines[-3:]}: {self.process.stderr.read()}")

    def wait_for_processes(self, count, timeout_s=90.0):
        deadline_s = time.monotonic() + timeout_s
        while len(self.vllm_processes()) < count:
            assert time.monotonic() < deadline_s and self.process.poll() is None, self.vllm_processes()
            time.sleep(0.1)

    def wait_for_another_producer(self, timeout_s=60.0):
        """The process that the supervisor starts in the place of a dead one."""
        deadline_s = time.monotonic() + timeout_s
        children = Path(f"/proc/{self.process.pid}/task")
        while not (new := [p for task in children.glob("*/children") for p in map(int, task.read_text().split())
                           if p != self.group and b"extract.producer" in read_command(p)]):  # fmt: skip
            assert time.monotonic() < deadline_s and self.process.poll() is None, "no producer"
            time.sleep(0.05)
        (self.group,) = new

    def vllm_processes(self):
        """Producer, engine core and worker in this order, resource trackers left out."""
        members = [p for p in group_members(self.group) if b"resource_tracker" not in read_command(p)]
        return sorted(members)  # each starts the next

    def finish(self):
        """Exit status, stderr and how long it took from now."""
        started_s = time.monotonic()
        said: list[str] = []
        # `communicate` would pass over the lines that `wait_for` has in its buffer.
        rest = threading.Thread(target=lambda: self.lines.extend(line.strip() for line in self.process.stdout))
        words = threading.Thread(target=lambda: said.append(self.process.stderr.read()))
        for reader in (rest, words):
            reader.daemon = True
            reader.start()
        self.process.wait(END_TIMEOUT_S)
        seconds = time.monotonic() - started_s
        for reader in (rest, words):
            reader.join(END_TIMEOUT_S)
        return self.process.returncode, said[0], seconds

    def assert_nothing_left(self):
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while (
            left := (
                group_members(self.group),
                list(self.temporary.iterdir()),
                new_shared_memory(self.shared_before),
            )
        ) != ([], [], set()):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)
        self.temporary.rmdir()


def test_a_killed_engine_core_ends_the_fit_with_the_reason(target, tmp_path):
    fit = FitSide(target, tmp_path)
    fit.wait_for_processes(3)
    fit.wait_for("sample 20 ")
    os.kill(fit.vllm_processes()[1], signal.SIGKILL)
    status, err, _ = fit.finish()
    assert status == 1
    assert "vLLM's producer" in err and "The last lines of" in err
    fit.assert_nothing_left()


@slow
def test_a_producer_killed_again_while_it_starts_again(target, tmp_path):
    fit = FitSide(target, tmp_path, max_restarts=2)
    fit.wait_for("sample 20 ")
    for _ in range(2):
        first = fit.group
        os.kill(first, signal.SIGKILL)
        fit.wait_for_another_producer()
    fit.wait_for("end")
    status, err, _ = fit.finish()
    assert status == 0, err
    assert [int(line.split()[1]) for line in fit.lines if line.startswith("sample")] == list(range(NUM_SAMPLES))
    fit.assert_nothing_left()
    what = "vLLM producer, SIGKILL, then the one that replaces it"
    OUTCOMES.append((what, "steady state, start-up", "recovered: every sample once, in order"))


@slow
def test_a_producer_killed_more_often_than_it_may_be_restarted(target, tmp_path):
    fit = FitSide(target, tmp_path, max_restarts=1)
    fit.wait_for("sample 20 ")
    os.kill(fit.group, signal.SIGKILL)
    fit.wait_for_another_producer()
    os.kill(fit.group, signal.SIGKILL)
    status, err, seconds = fit.finish()
    assert status == 1
    assert "after 1 restarts" in err
    seen = [int(line.split()[1]) for line in fit.lines if line.startswith("sample")]
    assert seen == list(range(len(seen)))
    fit.assert_nothing_left()
    what = "vLLM producer, SIGKILL, then the one that replaces it, one restart allowed"
    OUTCOMES.append((what, "steady state, start-up", f"ended after {seconds:.1f} s with {status}: reason"))


@slow
def test_a_good_run_leaves_nothing_either(target, tmp_path):
    fit = FitSide(target, tmp_path, num_samples=40)
    fit.wait_for("end")
    status, err, _ = fit.finish()
    assert status == 0, err
    fit.assert_nothing_left()
