"""One run, one directory: the lock, and what may lie there before a run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy_target

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.run_directory import LOCK_FILE, RunLock, check_run_dir

HOLDER = """
import sys, pathlib
from eagle3_lightning.run_directory import RunLock
lock = RunLock()
lock.acquire(pathlib.Path(sys.argv[1]))
print("held", flush=True)
if sys.stdin.readline().strip() == "release":
    lock.release()
    print("free", flush=True)
    sys.stdin.readline()
"""


def hold(run_dir: Path) -> "subprocess.Popen[str]":
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_a_directory_that_another_process_holds_is_refused_until_it_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    holder = hold(run_dir)
    lock = RunLock()
    with pytest.raises(ConfigError, match=f"another run is using it .process {holder.pid} on "):
        lock.acquire(run_dir)
    lock.release()  # of what it never had
    assert (run_dir / LOCK_FILE).exists()
    holder.kill()
    holder.wait()
    lock.acquire(run_dir)
    lock.release()
    assert run_dir.is_dir()  # somebody else made it
    assert list(run_dir.iterdir()) == []


def test_a_released_lock_leaves_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "a" / "run"
    holder = hold(run_dir)
    assert holder.stdin is not None
    assert holder.stdout is not None
    print("release", file=holder.stdin, flush=True)
    assert holder.stdout.readline() == "free\n"
    assert not run_dir.exists()
    lock = RunLock()
    lock.acquire(run_dir)  # although the first process still lives
    (run_dir / "result").touch()
    lock.release()
    assert [file.name for file in run_dir.iterdir()] == ["result"]
    holder.communicate("")


def test_a_lock_file_that_was_removed_meanwhile_is_worth_nothing(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    (tmp_path / LOCK_FILE).unlink()
    lock = RunLock()
    lock.acquire(tmp_path)  # a new file: the old one protects nobody
    assert holder.stdin is not None
    print("release", file=holder.stdin, flush=True)
    lock.release()
    holder.communicate("")


@pytest.mark.parametrize("make", [Path.touch, None])
def test_a_place_that_cannot_be_a_directory_is_refused(tmp_path: Path, make: object) -> None:
    run_dir = tmp_path / "run" if make else Path("/proc/run")
    if make:
        run_dir.touch()
    with pytest.raises(ConfigError, match="it is a file" if make else "cannot be written to"):
        RunLock().acquire(run_dir)


def leave(run_dir: Path, *names: str) -> None:
    for name in names:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()


def test_the_directory_of_a_run_that_made_no_step_is_free(tmp_path: Path) -> None:
    leave(
        tmp_path,
        LOCK_FILE,
        "vllm.log",
        "config.yaml",
        "config_2.yaml",
        "logs/version_0/hparams.yaml",
        "preview.html",
        "wandb_id",
        "wandb/offline-run-1/run-1.wandb",
        "wandb/offline-run-1/files/config.yaml",
        "lightning_logs/version_0/events.out.tfevents.1.host.1.0",
        "checkpoints/.last.ckpt.partial",
    )
    (tmp_path / "wandb/latest-run").symlink_to("offline-run-1")
    check_run_dir(tmp_path, None)


@pytest.mark.parametrize(
    "name",
    ["logs/version_0/metrics.csv", "summary.json", "export/config.json", "checkpoints/last.ckpt", "notes", "a/wandb/x"],
)
def test_what_may_be_of_value_is_not_mixed_with_a_new_run(tmp_path: Path, name: str) -> None:
    leave(tmp_path, "vllm.log", name)
    with pytest.raises(ConfigError, match="not empty") as caught:
        check_run_dir(tmp_path, None)
    assert "remove" not in caught.value.remedy  # who made it is not known
    check_run_dir(tmp_path, "last.ckpt")


def test_a_run_that_fails_behind_its_loggers_does_not_block_the_next(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    loggers = "[{class_path: TensorBoardLogger, init_args: {save_dir: .}}, {class_path: WandbLogger}]"
    command = [
        *(sys.executable, "-m", "eagle3_lightning", "fit", f"--run_dir={tmp_path / 'run'}", "--trainer.max_steps=5"),
        *(f"--target.path={toy_target.make_target(tmp_path / 'target')}", "--model.draft.draft_vocab_size=64"),
        *(f"--data.prompts.train=[{tmp_path / 'prompts.jsonl'}]", "--model.optim.warmup_steps=1"),
        *("--data.engine.start_timeout_s=0.01", f"--trainer.logger={loggers}"),
    ]
    # Without W&B's own variables: a service that another test started would still hold the first run.
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name} | {"WANDB_MODE": "offline"}
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1
        assert "start_timeout_s = 0.01" in done.stderr
        left = {path.name for path in (tmp_path / "run").rglob("*")}
        assert "wandb" in left
        assert any(name.startswith("events.out.tfevents") for name in left)
        assert LOCK_FILE not in left
