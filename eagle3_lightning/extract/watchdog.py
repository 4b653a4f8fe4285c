"""No process outlives the trainer.

Each of ours watches the others through pidfds, since vLLM's layers of processes (producer, engine core, workers) would
each notice only the death of its own parent, if that.
"""

import os
import re
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_TRACKER = "multiprocessing.resource_tracker"
_WORKERS_MEMORY = re.compile(r"/dev/shm/\S+-cpushm_\d+(?=\n)")


def watch(trainer_pid: int, producer_pid: int, private_dir: Path) -> None:
    """Start a thread that ends this process, and what belongs to it, as soon as trainer or producer is gone.

    The producer leads the process group of everything that it starts, and takes that group down. A worker takes its
    parent with it, which is vLLM's engine core.

    Args:
        trainer_pid: rank 0 of the trainer.
        producer_pid: the producer; this process, or the one that started it.
        private_dir: of the run's sockets; removed with the trainer, since a new producer would still need it.
    """
    poll = select.poll()
    watched: dict[int, int] = {}
    for pid in {trainer_pid, producer_pid} - {os.getpid()}:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            _end(pid, trainer_pid, producer_pid, private_dir)
        watched[descriptor] = pid
        poll.register(descriptor, select.POLLIN)

    def wait() -> None:
        _end(watched[poll.poll()[0][0]], trainer_pid, producer_pid, private_dir)

    threading.Thread(target=wait, name="eagle3-watchdog", daemon=True).start()


def _end(dead_pid: int, trainer_pid: int, producer_pid: int, private_dir: Path) -> NoReturn:
    who = "the trainer" if dead_pid == trainer_pid else "the producer"
    print(f"eagle3: {who} (process {dead_pid}) is gone, ending process {os.getpid()}", file=sys.stderr, flush=True)
    unlink_shared_memory(os.getpgid(0), private_dir)
    if dead_pid == trainer_pid:
        shutil.rmtree(private_dir, ignore_errors=True)
    if os.getpid() == producer_pid:
        kill_group(os.getpgid(0), signal.SIGKILL, spare={os.getpid()})
    elif os.getppid() not in (1, producer_pid):
        os.kill(os.getppid(), signal.SIGKILL)
    os._exit(1)


class ChildGuard:
    """Notices the death of vLLM's engine core or of a worker; `LLMEngine.step` would wait for a killed one for ever."""

    def __init__(self, on_death: Callable[[str], None], grace_s: float = 3.0) -> None:
        """Watch the processes that are in our group now, resource trackers left out.

        Args:
            on_death: called with the name of the dead process, from a thread.
            grace_s: time for vLLM to notice it by itself and to say more than we can.
        """
        self._disarmed = False
        poll = select.poll()
        names = {}
        for pid in group_members(os.getpgid(0)):
            if pid != os.getpid() and not _is_tracker(pid):
                descriptor = os.pidfd_open(pid)
                poll.register(descriptor, select.POLLIN)
                names[descriptor] = f"{_command(pid)[:40]} (process {pid})"

        def wait() -> None:
            dead = poll.poll()
            time.sleep(grace_s)
            if not self._disarmed:
                on_death(" and ".join(names[descriptor] for descriptor, _ in dead))

        if names:
            threading.Thread(target=wait, name="eagle3-child-guard", daemon=True).start()

    def disarm(self) -> None:
        """Their end is expected from here on."""
        self._disarmed = True


def kill_group(group: int, sign: signal.Signals, spare: set[int] | None = None) -> None:
    """Signal every process of a group.

    Python's resource trackers are not killed: they end by themselves when the last of the others is gone, and remove
    the shared memory which the killed ones could not.
    """
    for pid in group_members(group):
        if pid in (spare or ()) or (sign == signal.SIGKILL and _is_tracker(pid)):
            continue
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


def group_members(group: int) -> list[int]:
    """Living processes (zombies not counted) of a process group."""
    members = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                # The name in field 2 may hold anything, so fields are counted from its closing parenthesis.
                state, _, process_group = Path(entry.path, "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(process_group) == group and state != "Z":
                members.append(int(entry.name))
    return members


def unlink_shared_memory(group: int, private_dir: Path) -> None:
    """Take the names from the shared memory of vLLM's CPU workers, who would leave it behind, killed or not.

    It lives on where it is mapped; nobody opens it by name once the workers have met.

    Args:
        group: of the processes that may have it mapped.
        private_dir: of the run. vLLM names the memory after the file there over which its workers meet; older versions
            meet at a port.
    """
    names = {name for file in private_dir.glob("vllm_dist_*") for name in Path("/dev/shm").glob(f"{file.name}-*")}
    for pid in group_members(group):
        with suppress(OSError):  # it has ended
            names |= {Path(name) for name in _WORKERS_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text())}
    for name in names:
        name.unlink(missing_ok=True)


def wait_group(group: int, timeout_s: float) -> list[int]:
    """Wait for the processes of a group to end; those that still live after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while (members := group_members(group)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return members


def _is_tracker(pid: int) -> bool:
    return _TRACKER in _command(pid)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return "a dead process"
