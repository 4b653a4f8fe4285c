"""`eagle3 fit` as a process that tests disturb, and the table of what became of it."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from eagle3_lightning.extract.watchdog import group_members

END_TIMEOUT_S = 30.0
NUM_STEPS = 20
CHECKPOINT_EVERY = 10
TESTS = Path(__file__).parents[1]
# (what, when, outcome); printed by conftest.py as one table
OUTCOMES: list[tuple[str, str, str]] = []


class Recorder(pl.Callback):
    """Writes a line for each batch that was trained on: step, sample ids, loss to the last bit.

    Toy steps take milliseconds; a pause in each makes steady state long enough to be hit.
    """

    def __init__(self, file: str, pause_s: float = 0.2) -> None:
        self._file, self._pause_s = file, pause_s

    def on_train_batch_start(self, *args: Any) -> None:
        time.sleep(self._pause_s)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = [trainer.global_step, list(batch.sample_ids), float(outputs["loss"]).hex()]
        with open(f"{self._file}.rank{trainer.global_rank}", "a") as out:
            out.write(json.dumps(row) + "\n")


def make_material(folder: Path) -> Path:
    """A toy target with a tokenizer, and texts of its tokens, to be prefilled."""
    sys.path.insert(0, str(TESTS / "unit"))
    from toy_target import make_tokenizer
    from toy_targets import make_toy

    make_toy("llama", folder / "target")
    make_tokenizer().save_pretrained(str(folder / "target"))
    generator = torch.Generator().manual_seed(0)
    with (folder / "train.jsonl").open("w") as out:
        for i in range(400):
            ids = torch.randint(10, 256, (8 + i % 40,), generator=generator).tolist()
            out.write(json.dumps({"ids": ids, "loss_mask": [0] * 3 + [1] * (len(ids) - 3)}) + "\n")
    return folder


class Fit:
    """A running `eagle3 fit`."""

    running: "list[Fit]" = []

    def __init__(
        self,
        material: Path,
        run_dir: Path,
        *flags: str,
        program: str = "-m eagle3_lightning",
        environment: dict[str, str] | None = None,
        name: str = "",
    ) -> None:
        self.run_dir = run_dir
        self.temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own is too long for sockets
        self.shared_before = set(os.listdir("/dev/shm"))
        self.log = (material / f"{run_dir.parent.name}-{run_dir.name}{name}-{time.monotonic_ns()}.log").open("w+")
        self.record = self.log.name.removesuffix(".log")
        paths = [str(TESTS.parent), str(Path(__file__).parent), *filter(None, sys.path)]
        command = [sys.executable, *program.split(), "fit", f"--run_dir={run_dir}"]
        command += [
            f"--target.path={material / 'target'}",
            f"--data.prompts.train=[{material / 'train.jsonl'}]",
            "--data.prompts.val_fraction=0",
            "--data.sampling.mode=prefill",
            "--data.engine.max_model_len=128",
            "--data.engine.max_num_seqs=16",
            "--data.engine.cpu_threads=1",
            "--data.queue={capacity_tokens: 4096, block_tokens: 16}",
            "--data.batch.pack_tokens=128",
            "--data.batch.calibration_tokens=512",
            "--model.draft={draft_vocab_size: 256}",
            "--model.optim={warmup_steps: 2}",
            "--trainer.accelerator=cpu",
            f"--trainer.max_steps={NUM_STEPS}",
            "--trainer.log_every_n_steps=1",
            f"--checkpoint.every_n_train_steps={CHECKPOINT_EVERY}",
            "--trainer.callbacks+=fault_support.Recorder",
            f"--trainer.callbacks.file={self.record}",
            *flags,
        ]
        self.started_s = time.time()
        self.process = subprocess.Popen(
            command,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={
                **os.environ,
                "TMPDIR": str(self.temporary),
                "PYTHONPATH": os.pathsep.join(paths),
                # What vLLM compiles at its start, kept between runs.
                "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / "eagle3-tests-inductor"),
                "OMP_NUM_THREADS": "1",
                **(environment or {}),
            },
            start_new_session=True,
        )
        Fit.running.append(self)

    # -- while it runs ---------------------------------------------------------------------------------------------

    def output(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def wait_until(self, condition: Callable[[], object], what: str, timeout_s: float = 180.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline_s, f"no {what}: {self.output()[-3000:]}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: any(row[0] >= step for row in self.rows()), f"step {step}")

    def wait_for_vllm(self) -> None:
        """Until the producer runs, which takes some seconds more to be ready."""
        self.wait_until(lambda: (self.run_dir / "vllm.log").exists() and self.vllm_processes(), "vllm.log")

    def rows(self, rank: int = 0) -> list[tuple[int, list[int], str]]:
        """What Recorder has written so far; a line that is being written is left out."""
        file = Path(f"{self.record}.rank{rank}")
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [tuple(json.loads(line)) for line in lines if line.endswith("\n")]

    def descendants(self) -> list[int]:
        """All processes that this one started, directly or not, the deepest last."""
        found, todo = [], [self.process.pid]
        while todo:
            for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                try:
                    children = [int(pid) for pid in task.read_text().split()]
                except OSError:
                    continue
                found += children
                todo += children
        return found

    def vllm_processes(self) -> list[int]:
        """Producer, engine core and worker in this order, as far as they have a process of their own."""
        producers = [p for p in self.descendants() if b"extract.producer" in read_command(p)]
        if not producers:
            return []
        return sorted(p for p in group_members(min(producers)) if b"resource_tracker" not in read_command(p))

    def wait_for_vllm_process(self, number: int, what: str) -> int:
        """The pid of one of them that lasts: at the start there are also some that run for a moment only."""
        seen: list[int] = []

        def lasts() -> bool:
            before = seen[:]
            seen[:] = self.vllm_processes()
            time.sleep(0.2)
            return len(before) > number and before[: number + 1] == seen[: number + 1]

        self.wait_until(lasts, what)
        return seen[number]

    # -- at its end ------------------------------------------------------------------------------------------------

    def finish(self, timeout_s: float = END_TIMEOUT_S) -> tuple[int, float]:
        """Exit status, and the seconds from now to the end."""
        started_s = time.monotonic()
        status = self.process.wait(timeout=timeout_s)
        return status, time.monotonic() - started_s

    def succeed(self) -> "Fit":
        status, _ = self.finish(timeout_s=240)
        assert status == 0, self.output()[-3000:]
        self.assert_nothing_left()
        return self

    def assert_nothing_left(self) -> None:
        """No process that knows of this run's temporary directory, no file in it, no shared memory beside it."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while any(left := (self.processes(), list(self.temporary.iterdir()), self.new_shared_memory())):
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)
        self.temporary.rmdir()

    def processes(self) -> list[str]:
        """Whatever was started by this run has its TMPDIR, or one inside it."""
        mark, found = b"TMPDIR=" + os.fsencode(self.temporary), []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes():
                    found.append(f"{entry.name} {read_command(int(entry.name))[:80]!r}")
            except OSError:
                continue
        return found

    def named_memory(self) -> set[str]:
        return set(os.listdir("/dev/shm")) - self.shared_before

    def new_shared_memory(self) -> set[str]:
        return new_shared_memory(self.shared_before)


def new_shared_memory(before: set[str]) -> set[str]:
    """Names that Python, torch or vLLM give, that were not there before; other tests may run beside this one."""
    names = set(os.listdir("/dev/shm")) - before
    return {name for name in names if re.match(r"(psm_|torch_|sem\.mp-|vllm|eagle3)", name) and not _in_use(name)}


def end_running() -> None:
    """After a test, also a failed one: vLLM and other ranks end with the process that they belong to."""
    for fit in Fit.running:
        if fit.process.poll() is None:
            fit.process.kill()
            fit.process.wait()
    Fit.running.clear()


def _in_use(name: str) -> bool:
    """Whether a living process, of another test, has it mapped."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text():
                return True
        except OSError:
            continue
    return False


def read_command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def assert_same(rows: Sequence[tuple[int, list[int], str]], straight: Sequence[tuple[int, list[int], str]]) -> None:
    """Every row is one of the undisturbed run: the samples of the batch, and the loss to the last bit."""
    expected = {row[0]: row for row in straight}
    assert rows
    assert [row for row in rows if row != expected[row[0]]] == []


def read_position(file: Path) -> tuple[int, int]:
    """Step and next sample of a checkpoint."""
    saved = torch.load(file, weights_only=False, map_location="cpu")
    data = saved["HiddenStateDataModule"]
    assert saved["global_step"] == data["step"]
    return data["step"], data["next_sample"]


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A file system of its own, of a given size."""
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> Path:
    """Write until the disk is full."""
    file = place / "filler"
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"\0" * 4096)
        except OSError:
            pass
    return file
