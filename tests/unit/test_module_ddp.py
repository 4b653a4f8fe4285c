"""Two ranks with uneven masks and accumulated micro-batches do what one process does on all of them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_target import make_target


def fit(target: Path, out: Path, num_ranks: int, accumulate: int) -> dict[str, Any]:
    script = Path(__file__).with_name("ddp_fit.py")
    run = subprocess.run(
        [sys.executable, str(script), str(target), str(out), str(num_ranks), str(accumulate)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    return torch.load(out, weights_only=True)  # type: ignore[no-any-return]


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    one = fit(target, tmp_path / "one.pt", 1, 6)
    two = fit(target, tmp_path / "two.pt", 2, 3)
    assert one["steps"] == two["steps"] == 2
    assert torch.equal(one["totals"], two["totals"])
    for name, value in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-4, atol=1e-5, msg=name)
    for name, value in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-4, nan_ok=True), name
