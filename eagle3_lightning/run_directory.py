"""One run, one directory: held by a lock while it runs, refused when it holds another run."""

import errno
import fcntl
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from eagle3_lightning.errors import ConfigError

CHECKPOINTS = "checkpoints"
VALIDATION = "validation"  # logs of `eagle3 validate`
LOCK_FILE = ".lock"
# What a run leaves that was refused or never made a step; metrics.csv is there from the first logged step on.
_UNUSED_FILES = (
    LOCK_FILE,
    "vllm.log",
    "config*.yaml",
    "hparams.yaml",
    "preview.html",
    "self_prompts.json*",  # not made a second time under the same options
    "wandb_id",
    "events.out.tfevents.*",  # of TensorBoard, which writes one as soon as it is made
    ".*.partial",
)
_UNUSED_DIRECTORIES = ("wandb",)
_TRIES = 20
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_log = logging.getLogger(__name__)


class RunLock:
    """Only one `eagle3 fit` in a directory; the kernel frees the lock when its process is gone, however it ended.

    A record lock and not flock: children that are forked do not inherit it, and NFS knows it.
    """

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._descriptor: int | None = None
        self._file: Path | None = None
        self._made = False  # the directory

    def acquire(self, run_dir: Path) -> None:
        """Make the directory if need be, and lock it.

        Raises:
            ConfigError: it is a file, it cannot be made, or another process holds it.
        """
        if run_dir.exists() and not run_dir.is_dir():
            raise ConfigError("--run_dir", str(run_dir), "it is a file", "Name a new directory.")
        self._file, self._made = run_dir / LOCK_FILE, not run_dir.exists()
        fault = ""
        for _ in range(_TRIES):
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                self._descriptor = self._try_lock(self._file)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _log.warning("%s is on a file system without locks: start no second run in it", run_dir)
                    return
                fault = error.strerror or str(error)
                if not isinstance(error, FileNotFoundError):  # which is a run that has just ended and removed it
                    break
            else:
                return
        problem = f"it cannot be written to ({fault})"
        raise ConfigError("--run_dir", str(run_dir), problem, "Name another directory.")

    def release(self) -> None:
        """Free the directory, and remove what was made to lock it; a second call does nothing."""
        if self._descriptor is None or self._file is None:
            return
        with suppress(OSError):  # removed while it is still locked, see `_try_lock`
            if os.fstat(self._descriptor).st_ino == self._file.stat().st_ino:
                self._file.unlink()
            if self._made:
                self._file.parent.rmdir()  # which fails unless it is empty
        os.close(self._descriptor)
        self._descriptor = None

    @staticmethod
    def _try_lock(file: Path) -> int:
        """The locked file.

        Raises:
            ConfigError: another process holds it.
            FileNotFoundError: its last holder has removed it meanwhile, so that the lock would be worth nothing.
        """
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_ino != file.stat().st_ino:
                raise FileNotFoundError(errno.ENOENT, "it was removed meanwhile", str(file))
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        except (BlockingIOError, PermissionError) as error:  # the two that POSIX allows for "held by another"
            holder = os.read(descriptor, 200).decode(errors="replace") or "a process"
            os.close(descriptor)
            raise ConfigError(
                "--run_dir",
                str(file.parent),
                f"another run is using it ({holder})",
                "Name another directory, or wait for the end of that run.",
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def check_run_dir(run_dir: Path, ckpt_path: str | None) -> None:
    """Refuse to mix two runs in one directory; what a run leaves that never made a step is no run.

    Raises:
        ConfigError: the directory is a file, or holds something else and no checkpoint is resumed.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError("--run_dir", str(run_dir), "it is a file", "Name a new directory.")
    if ckpt_path is not None or not any(_is_used(file, run_dir) for file in run_dir.rglob("*")):
        return
    resumable = (run_dir / CHECKPOINTS / "last.ckpt").is_file()
    raise ConfigError(
        "--run_dir",
        str(run_dir),
        "it exists and is not empty",
        "Name a new directory, or go on with that run: --ckpt_path last."
        if resumable
        else "It holds no checkpoint to go on from: name a new directory.",
    )


def _is_used(file: Path, run_dir: Path) -> bool:
    if file.is_dir() or file.relative_to(run_dir).parts[0] in _UNUSED_DIRECTORIES:
        return False
    return not any(map(file.match, _UNUSED_FILES))
