"""What the callbacks log and print, and that docs/metrics.md describes all of it."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from jsonargparse import Namespace

from eagle3_lightning.callbacks.acceptance import keep, serve_metrics
from eagle3_lightning.callbacks.data_summary import RunSums, totals, totals_line
from eagle3_lightning.callbacks.progress import status_line
from eagle3_lightning.callbacks.run_config import free_name
from eagle3_lightning.callbacks.throughput import rates
from eagle3_lightning.datamodule import DataStats
from eagle3_lightning.draft.metrics import DraftMetrics
from eagle3_lightning.export.read import PROVENANCE_FILE
from eagle3_lightning.loggers import CSV, WANDB, WANDB_ID_FILE, complete_logger
from eagle3_lightning.provenance import versions
from eagle3_lightning.report import read_curves
from eagle3_lightning.serve.messages import Pass
from eagle3_lightning.serve.results import BenchReport, draft_figures
from eagle3_lightning.stream.messages import DropReason, Stats
from eagle3_lightning.stream.queue import QueueStats
from eagle3_lightning.summary import served_figures

ROOT = Path(__file__).parents[2]


def make_stats(decode_tokens: int, busy_s: float, wait_s: float) -> DataStats:
    producer = Stats(100, decode_tokens, busy_s, running=8, starved_s=busy_s / 4)
    queue = QueueStats(5, 700, 1000, 0.0, 20, 5, 0, {"too_long": 2}, {}, producer, 0)
    return DataStats(queue, 1, wait_s, 40, 100)


def make_report() -> BenchReport:
    one = Pass(4, 2.0, [[1, 2, 3]] * 4, [1] * 4, 4, 12, 4, [2, 1, 1])
    figures = draft_figures(3, "p", one, replace_pass(one), [], "bfloat16")
    return BenchReport("d", "t", 4, 3, "bfloat16", "cpu", "0.32.0", [1.0], [figures], [], True)


def replace_pass(one: Pass) -> Pass:
    return Pass(one.concurrency, 1.0, one.tokens, one.rounds, 0, 0, 0, [])


def test_rates_are_of_the_time_between() -> None:
    found = rates(make_stats(1000, 10.0, 1.0), make_stats(1600, 14.0, 2.0), elapsed_s=4.0)
    assert found["producer/decode_tokens_per_s"] == 150.0
    assert found["producer/prefill_tokens_per_s"] == 0.0
    assert (found["producer/busy_share"], found["producer/starved_share"], found["perf/wait_share"]) == (
        1.0,
        0.25,
        0.25,
    )
    assert (found["queue/depth_samples"], found["queue/dropped"], found["queue/cut_share"]) == (5.0, 2.0, 0.25)


def test_counters_of_a_restarted_producer_are_not_negative() -> None:
    found = rates(make_stats(1000, 10.0, 1.0), make_stats(10, 0.5, 1.0), elapsed_s=1.0)
    assert all(value >= 0 for value in found.values())


def test_a_run_is_summed_up() -> None:
    sums = RunSums.of(make_stats(1000, 10.0, 1.0), 4.0)
    without = totals(sums)
    assert (without["mean_depth_tokens"], without["mean_depth_bytes"]) == (None, None)
    assert totals_line(without).endswith("10 and 100 a second of its work")  # no look at the queue, no word of it
    for tokens, size_bytes in ((100, 2**20), (300, 3 * 2**20)):
        sums.look(tokens, size_bytes)
    found = totals(sums)
    assert (found["samples_taken"], found["samples_dropped"], found["samples_cut"]) == (20, {"too_long": 2}, 5)
    assert (found["producer_restarts"], found["trainer_wait_s"], found["trainer_wait_share"]) == (0, 1.0, 0.25)
    assert totals_line(found) == (
        "20 samples taken, 2 dropped (too_long 2), 5 cut by the length limit; 0 restarts of vLLM; the trainer waited "
        "1.0 s (25.0%) for data, vLLM 2.5 s for room in the queue; vLLM ran 100 prompt and made 1,000 answer tokens, "
        "10 and 100 a second of its work; 200 tokens (2.0 MiB) were queued on average"
    )


def test_the_served_figures_say_at_which_step_the_draft_was_exported(tmp_path: Path) -> None:
    report = msgspec.structs.replace(make_report(), draft=str(tmp_path))
    assert served_figures(report)["served_step"] is None  # no export of ours
    (tmp_path / PROVENANCE_FILE).write_text('{"step": 300}')
    assert served_figures(report)["served_step"] == 300


def test_every_logged_metric_is_described() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    described = set(re.findall(r"`([a-z_/]+)`", text))
    assert "`queue/dropped_REASON`" in text
    described |= {f"queue/dropped_{reason}" for reason in get_args(DropReason) if reason in described}
    logged = set(rates(make_stats(0, 0.0, 0.0), make_stats(0, 0.0, 0.0), 1.0)) | {"perf/tokens_per_s"}
    logged |= {name.removeprefix("serve/") for name in serve_metrics(make_report().figures[0], make_report())}
    logged |= set(DraftMetrics(3).compute())
    source = (ROOT / "eagle3_lightning" / "module.py").read_text()
    logged |= {name.removeprefix("train/") for name in re.findall(r'named\["(train/[a-z_]+)"\]', source)}
    assert len(logged) > 25
    missing = {name for name in (re.sub(r"_\d+$", "_k", name) for name in logged) if name not in described}
    assert missing == set()


def test_one_line_of_progress() -> None:
    metrics = {"train/loss": 2.5, "val/tau": 1.61803, "perf/tokens_per_s": 12345.6, "queue/depth_samples": 7.0}
    assert status_line(metrics) == "loss 2.500  val tau 1.618  12,346 tokens/s  queue 7"
    assert status_line({}) == ""


def test_configurations_of_later_starts_stand_beside_the_first(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        file = free_name(tmp_path)
        file.touch()
        names.append(file.name)
    assert names == ["config.yaml", "config_2.yaml", "config_3.yaml"]


CSV_ELSEWHERE = Namespace(class_path=CSV, init_args=Namespace(save_dir="elsewhere", name="logs"))


def wandb_config() -> Namespace:
    arguments = {"name": None, "save_dir": ".", "version": None, "offline": False, "id": None, "project": None}
    return Namespace(class_path=WANDB, init_args=Namespace(**arguments))


def test_wandb_is_offline_without_an_account_and_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    run_dir = tmp_path / "myrun"
    run_dir.mkdir()
    logger, csv = complete_logger(wandb_config(), run_dir)
    assert (logger.init_args.offline, logger.init_args.name, logger.init_args.save_dir) == (True, "myrun", str(run_dir))
    assert csv.class_path.endswith("CSVLogger")  # what `eagle3 report` draws
    assert f"logged offline, into {run_dir / 'wandb'}" in caplog.text
    (run_dir / WANDB_ID_FILE).write_text("abc123\n")
    logger, csv = complete_logger(wandb_config(), run_dir)
    assert logger.init_args.id == "abc123"
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_FINISH_TIMEOUT", "7")
    with answering(404) as url:
        monkeypatch.setenv("WANDB_BASE_URL", url)
        logger, csv = complete_logger(wandb_config(), run_dir)
        assert os.environ["WANDB_FINISH_TIMEOUT"] == "7"
        monkeypatch.delenv("WANDB_FINISH_TIMEOUT")
        complete_logger(wandb_config(), run_dir)
    assert os.environ["WANDB_FINISH_TIMEOUT"] == "600"  # a server that is gone ends no run, and keeps none
    assert logger.init_args.offline is False


@contextmanager
def answering(status: int) -> Iterator[str]:
    """The address of a server that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("fault", ["closed port", "503", "no URL"])
def test_an_unreachable_wandb_server_makes_the_run_an_offline_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    with answering(503) as url:
        pass
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")
    if fault == "503":
        with answering(503) as url:
            monkeypatch.setenv("WANDB_BASE_URL", url)
            logger, _ = complete_logger(wandb_config(), tmp_path)
    else:
        monkeypatch.setenv("WANDB_BASE_URL", url if fault == "closed port" else "nowhere")
        logger, _ = complete_logger(wandb_config(), tmp_path)
    assert logger.init_args.offline is True
    assert f"offline, into {tmp_path / 'wandb'}" in caplog.text
    assert {"closed port": url, "503": "answers with 503", "no URL": "nowhere"}[fault] in caplog.text
    monkeypatch.setenv("WANDB_MODE", "offline")  # asked for: nobody is asked, nothing to say
    caplog.clear()
    complete_logger(wandb_config(), tmp_path)
    assert caplog.text == ""


def test_another_rank_does_not_say_that_the_run_is_offline(tmp_path: Path) -> None:
    """What rank 0 says is tested above."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import test_callbacks as t\n"
    code += "print(t.complete_logger(t.wandb_config(), Path(sys.argv[2]))[0].init_args.name)"
    kept = {name: value for name, value in os.environ.items() if "WANDB" not in name and "RANK" not in name}
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)],
        env=kept | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "LOCAL_RANK": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{tmp_path.name}\n"
    assert "offline" not in done.stderr


def test_csv_is_the_default_logger(tmp_path: Path) -> None:
    (logger,) = complete_logger(None, tmp_path)
    assert logger.class_path.endswith("CSVLogger")
    assert logger.init_args.save_dir == str(tmp_path)
    assert complete_logger(False, tmp_path) is False


def test_a_validation_logs_beside_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the run's own config.yaml, which names its directory and its W&B run."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / WANDB_ID_FILE).write_text("abc123\n")
    resolved = complete_logger(wandb_config(), tmp_path)
    assert {entry.init_args.save_dir for entry in resolved} == {str(tmp_path)}
    wandb, csv = complete_logger(resolved, tmp_path, validation=True)
    assert wandb.init_args.save_dir == csv.init_args.save_dir == str(tmp_path / "validation")
    assert wandb.init_args.id not in (None, "abc123")
    file = tmp_path / "validation" / csv.init_args.name / "version_0" / "metrics.csv"
    file.parent.mkdir(parents=True)
    file.write_text("step,val/loss\n1,5.0\n")
    assert read_curves(tmp_path) == {}
    (elsewhere,) = complete_logger(CSV_ELSEWHERE, tmp_path, validation=True)
    assert elsewhere.init_args.save_dir == "elsewhere"


def test_the_best_draft_is_replaced_wholly(tmp_path: Path) -> None:
    export, best = tmp_path / "export", tmp_path / "best"
    export.mkdir()
    (export / "config.json").write_text("1")
    keep(export, best)
    (best / "stale").touch()
    (export / "config.json").write_text("2")
    keep(export, best)
    assert [(file.name, file.read_text()) for file in best.iterdir()] == [("config.json", "2")]


def test_a_failed_copy_leaves_the_best_draft(tmp_path: Path) -> None:
    export, best = tmp_path / "export", tmp_path / "best"
    export.mkdir()
    (export / "config.json").write_text("1")
    keep(export, best)
    (export / "gone").symlink_to(tmp_path / "nowhere")  # what cannot be copied
    with pytest.raises(OSError, match="gone"):
        keep(export, best)
    assert [(file.name, file.read_text()) for file in best.iterdir()] == [("config.json", "1")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "export"]


def test_versions_name_what_can_change_a_result() -> None:
    found = versions()
    assert found["vllm"]
    assert found["torch"]
