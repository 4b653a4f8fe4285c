"""Named shared memory that processes of ours leave: real files in /dev/shm, real processes."""

import os
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from eagle3_lightning.extract.watchdog import unlink_shared_memory

MEMORY = Path("/dev/shm")
HOLD = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(m[:2], flush=True); input()"


@pytest.fixture
def name():
    """A function that makes shared memory of a name; what is left at the end is removed."""
    made = []

    def make(start):
        made.append(MEMORY / f"{start}-tp:0-[0-1]-cpushm_{len(made)}")
        made[-1].write_bytes(b"hi" * 2048)
        return made[-1]

    yield make
    for path in made:
        with suppress(FileNotFoundError):
            path.unlink()


def test_memory_that_is_named_after_the_run_s_own_file_goes(tmp_path, name):
    own, other = f"vllm_dist_{uuid.uuid4().hex}", f"vllm_dist_{uuid.uuid4().hex}"
    (tmp_path / own).touch()
    first, second, foreign = name(own), name(own), name(other)
    unlink_shared_memory(os.getpgid(0), tmp_path)
    assert [path.exists() for path in (first, second, foreign)] == [False, False, True]


def test_memory_that_the_group_has_mapped_goes_and_can_be_read_on(tmp_path, name):
    mapped, foreign = name(f"{uuid.uuid4().int}"), name(f"{uuid.uuid4().int}")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD + "; print(m[2:4], flush=True)", str(mapped)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    with holder:
        assert holder.stdout.readline() == "b'hi'\n"
        unlink_shared_memory(os.getpgid(0), tmp_path)  # of another group
        assert mapped.exists()
        unlink_shared_memory(holder.pid, tmp_path)
        assert not mapped.exists() and foreign.exists()
        unlink_shared_memory(holder.pid, tmp_path)  # again: nothing is left to be done
        assert holder.communicate("\n")[0] == "b'hi'\n"
