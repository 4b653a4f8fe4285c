"""`perf/mfu`: counted FLOPs of all ranks over time and peak, whatever the time was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ddp_fit import MASKS
from draft_reference import make_batch
from mfu_fit import PEAK_TFLOPS
from test_module import make_module, make_trainer
from toy_target import make_target

from eagle3_lightning.callbacks.throughput import ThroughputCallback
from eagle3_lightning.draft.plan import plan_unroll
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.plan.flops import Work, flops_done


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_share_is_of_every_ranks_flops_and_peak(tmp_path: Path, num_ranks: int) -> None:
    target, out = make_target(tmp_path / "target"), tmp_path / "metrics.json"
    script = Path(__file__).with_name("mfu_fit.py")
    command = [sys.executable, str(script), str(target), str(out), str(num_ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads(out.read_text())
    config = make_module(target).draft.config
    plans = [plan_unroll(make_batch(documents, config), 3) for documents in MASKS]
    flops = sum(flops_done(config, 3, Work.of_plan(plan)) for plan in plans)
    tokens = sum(plan.num_slots for plan in plans)
    # Both are over the same seconds, so that their ratio is free of them.
    expected = flops / (tokens * PEAK_TFLOPS * 1e12 * num_ranks)
    assert metrics["perf/mfu"] / metrics["perf/tokens_per_s"] == pytest.approx(expected, rel=1e-5)


def test_on_a_cpu_there_is_none_unless_the_peak_is_given(tmp_path: Path) -> None:
    from mfu_fit import Closed

    module = make_module(make_target(tmp_path / "target"), loss={"ttt_steps": 3})
    trainer = make_trainer(tmp_path, callbacks=[ThroughputCallback()])
    trainer.fit(module, datamodule=Closed(module, MASKS[:2]))
    assert "perf/tokens_per_s" in trainer.logged_metrics
    assert "perf/mfu" not in trainer.logged_metrics


def test_a_senseless_peak_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"throughput\.peak_tflops = 0"):
        ThroughputCallback(0.0)
