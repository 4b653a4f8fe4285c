"""How the tap's rows come from the GPU to the arena, without one: see copier_side.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("what", ["order", "room", "fault", "end"])
def test_rows_of_steps_that_are_written_together(what):
    program = Path(__file__).with_name("copier_side.py")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, program, what], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("written" in done.stdout) == (what == "end")
