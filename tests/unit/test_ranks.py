"""Ranks that wait for rank 0 longer than their process group's own timeout."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, time
from datetime import timedelta
from types import SimpleNamespace
import torch.distributed as dist
from eagle3_lightning.errors import ProducerError
from eagle3_lightning.ranks import rank_zero_first
rank, store, work_s, timeout_s = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
open(f"{store}.{rank}", "w").close()
while not os.path.exists(f"{store}.{1 - rank}"):  # imports take long on a busy machine
    time.sleep(0.1)
dist.init_process_group("gloo", f"file://{store}", timeout=timedelta(seconds=6), rank=rank, world_size=2)
trainer = SimpleNamespace(world_size=2, is_global_zero=rank == 0)
try:
    with rank_zero_first(trainer, "the work", timeout_s) as here:
        print(here, flush=True)
        if here:
            time.sleep(work_s)
    print("through", flush=True)
except ProducerError as error:
    print(str(error).split("(")[0], flush=True)
"""


@pytest.mark.parametrize(
    ("work_s", "timeout_s", "end"),
    [(8, 60, "through"), (9, 5, "the ranks did not meet behind the work of rank 0 within 5 s ")],
)
def test_ranks_wait_for_rank_0_and_not_for_ever(tmp_path: Path, work_s: float, timeout_s: float, end: str) -> None:
    commands = [
        [sys.executable, "-c", SCRIPT, str(r), str(tmp_path / "s"), str(work_s), str(timeout_s)] for r in (0, 1)
    ]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [rank.communicate(timeout=180)[0].splitlines() for rank in ranks]
    assert [lines[0] for lines in said] == ["True", "False"]
    assert said[1][1] == end
    if end == "through":
        assert said[0][1] == end
