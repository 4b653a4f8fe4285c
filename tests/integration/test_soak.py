"""The long soak of the queue; a short one is among the unit tests."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from queue_bench import soak

pytestmark = pytest.mark.tap


def test_soak_of_20000_samples():
    before, after = soak(20_000, settled=2000, growth=1.02)
    print("private memory of producer and trainer after 2,000 and 20,000 samples:", before, after)
