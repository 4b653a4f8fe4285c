"""The Triton kernels on the CPU, by Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_kernels_in_the_interpreter() -> None:
    """In a process of its own: Triton decides at its import whether to interpret."""
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("kernel_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    run = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
