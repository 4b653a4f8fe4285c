"""Run one vLLM job in a process of its own, with a deadline on every wait, and leave nothing behind."""

import io
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from eagle3_lightning.errors import ProducerError
from eagle3_lightning.extract.environment import child_environment
from eagle3_lightning.extract.watchdog import kill_group, unlink_shared_memory, wait_group
from eagle3_lightning.serve.messages import DONE, START_STAGES, EngineJob, EngineResult, Progress
from eagle3_lightning.vllm_log import log_tail

TERM_TIMEOUT_S = 10.0
MAX_SOCKET_DIR_BYTES = 107 - len("/") - 36  # a socket's path has at most 107 bytes, and vLLM appends a UUID


def run_engine(
    job: EngineJob,
    *,
    label: str,
    log_file: Path,
    start_timeout_s: float,
    step_timeout_s: float,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> EngineResult:
    """Start vLLM, do the job, stop it.

    Args:
        job: what to do; its `result` is replaced by a file in a private directory, its `parent_pid` by this process.
        label: how messages call this engine, for example `target with draft`.
        log_file: where everything goes that vLLM prints.
        start_timeout_s: longest wait for the engine to start.
        step_timeout_s: longest wait for the next request to finish.
        on_progress: called with each event.

    Raises:
        ProducerError: the engine died or missed a deadline; the message ends with its last log lines.
        ConfigError: vLLM does not take the user's engine arguments.
    """
    with tempfile.TemporaryDirectory(prefix="eagle3-bench-") as private, log_file.open("wb") as log:
        result_file = Path(private) / "result.json"
        job = msgspec.structs.replace(job, result=str(result_file), parent_pid=os.getpid())
        job_file = Path(private) / "job.json"
        job_file.write_bytes(msgspec.json.encode(job))
        read_fd, write_fd = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3_lightning.serve.engine_process", str(job_file), str(write_fd)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[write_fd],
            start_new_session=True,  # its own group, so that it can be killed wholly; Ctrl-C reaches it through us
            env=_environment(private) | job.env,
        )
        try:
            os.close(write_fd)
            with os.fdopen(read_fd, "rb", buffering=0) as events:
                _follow(events, label, log_file, start_timeout_s, step_timeout_s, on_progress)
            if not result_file.exists():
                code = _exit_code(process, label, log_file)
                raise ProducerError(f"the engine ({label}) died with exit code {code}.{log_tail(log_file)}")
            return msgspec.json.decode(result_file.read_bytes(), type=EngineResult)
        finally:
            unlink_shared_memory(process.pid, Path(private))  # while it is seen who has it
            stop(process)
            unlink_shared_memory(process.pid, Path(private))  # of workers that were just starting


def _environment(private: str) -> dict[str, str]:
    environment = child_environment()
    if len(os.fsencode(private)) <= MAX_SOCKET_DIR_BYTES:
        # What torch compiles is kept, as it would be without this.
        kept = Path(tempfile.gettempdir()) / f"torchinductor_uid_{os.getuid()}"
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(kept))
        environment["TMPDIR"] = private  # vLLM's sockets, and the file over which its workers meet
    return environment


def _follow(
    events: io.RawIOBase,
    label: str,
    log_file: Path,
    start_timeout_s: float,
    step_timeout_s: float,
    on_progress: Callable[[Progress], None],
) -> None:
    """Read events until the child says that it is done, or closes its end because it died."""
    selector = selectors.DefaultSelector()
    selector.register(events, selectors.EVENT_READ)
    stage, timeout_s, pending = "start", start_timeout_s, b""
    with selector:
        while True:
            if not selector.select(timeout_s):
                raise ProducerError(
                    f"the engine ({label}) said nothing for {timeout_s:.0f} s at stage `{stage}`.{log_tail(log_file)}"
                )
            chunk = events.read(65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                progress = msgspec.json.decode(line, type=Progress)
                if progress.mistake is not None:
                    raise progress.mistake.as_error()
                stage = progress.stage
                timeout_s = start_timeout_s if stage in START_STAGES else step_timeout_s
                on_progress(progress)
                if stage == DONE:
                    return


def _exit_code(process: subprocess.Popen[bytes], label: str, log_file: Path) -> int:
    try:
        return process.wait(TERM_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ProducerError(
            f"the engine ({label}) closed its event pipe and did not exit within {TERM_TIMEOUT_S:.0f} s."
            f"{log_tail(log_file)}"
        ) from error


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and whatever it started: TERM, a grace period, KILL."""
    kill_group(process.pid, signal.SIGTERM)
    process.poll()  # reap it, or it stays in its group
    if wait_group(process.pid, TERM_TIMEOUT_S):
        kill_group(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # it hangs in the driver, and ends when that lets go of it
        process.wait(TERM_TIMEOUT_S)
