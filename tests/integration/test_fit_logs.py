"""One real `eagle3 fit`, resumed once, with all three loggers: what they hold, and that docs/metrics.md names it."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb_file import items, records

from eagle3_lightning.cli import main
from eagle3_lightning.loggers import WANDB_ID_FILE
from eagle3_lightning.options import TargetOptions
from eagle3_lightning.report import read_curves
from eagle3_lightning.target import inspect_target

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".cache" / "target" / "smollm2-135m"
LOGGERS = ("TensorBoardLogger", "WandbLogger")
TTT_STEPS = 2
TOPICS = (
    "rivers",
    "trains",
    "music",
    "bread",
    "winter",
    "numbers",
    "birds",
    "paint",
    "sleep",
    "stones",
    "clocks",
    "soup",
)


SAID = "said.txt"  # by both starts


def configuration(place: Path) -> Path:
    prompts = place / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Tell me about {t}, please."}) + "\n" for t in TOPICS * 3))
    config: dict[str, Any] = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    config["target"]["path"] = str(TARGET)
    config["run_dir"] = str(place / "run")
    config["model"]["draft"]["draft_vocab_size"] = 512
    config["model"]["loss"]["ttt_steps"] = TTT_STEPS
    config["model"]["optim"]["warmup_steps"] = 1
    config["data"]["prompts"] = {"train": [str(prompts)], "val_fraction": 0.2, "max_val_samples": 4}
    config["data"]["sampling"]["max_new_tokens"] = 24
    config["data"]["engine"].update(max_model_len=128, max_num_seqs=16)
    config["data"]["queue"]["capacity_tokens"] = 4096
    config["data"]["batch"].update(pack_tokens=128, calibration_tokens=300)
    loggers = [{"class_path": f"lightning.pytorch.loggers.{name}", "init_args": {"save_dir": "."}} for name in LOGGERS]
    config["trainer"].update(max_steps=6, log_every_n_steps=2, val_check_interval=3, logger=loggers)
    config["checkpoint"] = {"every_n_train_steps": 6}
    config["acceptance"] = {"prompts": str(prompts), "max_prompts": 4, "max_new_tokens": 12, "concurrency": 4}
    config["throughput"] = {"peak_tflops": 0.1}
    file = place / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def fit(config: Path, *more: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_DATA_DIR": str(config.parent), "HF_HUB_OFFLINE": "1"}
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "eagle3_lightning", "fit", "--config", str(config), *more]
    done = subprocess.run(
        command, env={**environment, "HOME": str(config.parent)}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = configuration(tmp_path_factory.mktemp("logs"))
    said = fit(config)
    said += fit(config, "--ckpt_path", "last", "--trainer.max_steps", "8", "--acceptance.prompts", "null")
    (config.parent / SAID).write_text(said)
    return config.parent / "run"


def test_a_run_says_nothing_that_is_lightnings_own(run_dir: Path) -> None:
    said = (run_dir.parent / SAID).read_text()
    assert said.count("parameters to train") == 2
    for noise in ("FLOPs", "weights_only", "exists and is not empty", "Tip: "):
        assert noise not in said
    resumed = json.loads((run_dir / "summary.json").read_text())
    assert (resumed["steps"], resumed["simulated_step"], resumed["served_step"]) == (8, 6, 6)
    assert resumed["simulated_tau"] >= 1


def logged(run_dir: Path) -> set[str]:
    """Every metric in the CSV files."""
    names: set[str] = set()
    for file in run_dir.glob("logs/*/metrics.csv"):
        names |= set(next(csv.reader(file.open())))
    return names - {"step", "epoch"}


def described(num_steps: int) -> set[str]:
    """Every metric in the tables of docs/metrics.md, `_k` written out."""
    names = set()
    sections = re.split(r"^## ", (ROOT / "docs" / "metrics.md").read_text(), flags=re.MULTILINE)
    for section in sections[1:]:
        groups = re.findall(r"([a-z]+)/", section.splitlines()[0])
        for row in re.findall(r"^\| (`.*)$", section, flags=re.MULTILINE):
            cell = row.split(" | ")[0]
            only = "`train/` only" in row
            for name in re.findall(r"`([a-z_/]+)`", cell):
                full = {name} if "/" in name else {f"{group}/{name}" for group in groups[: 1 if only else None]}
                if name.endswith("_k"):
                    full = {f"{f.removesuffix('_k')}_{k}" for f in full for k in range(1, num_steps + 1)}
                names |= full
    return names


def test_what_is_logged_is_described_and_what_is_described_is_logged(run_dir: Path) -> None:
    assert logged(run_dir) == described(TTT_STEPS)


def wandb_runs(run_dir: Path) -> list[list[Any]]:
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    return [list(records(file)) for file in files]


def history(run: list[Any]) -> list[dict[str, str]]:
    return [items(record.history.item) for record in run if record.WhichOneof("record_type") == "history"]


def test_wandb_holds_one_run_under_one_id(run_dir: Path) -> None:
    runs = wandb_runs(run_dir)
    assert len(runs) == 2  # two starts
    ids = [record.run.run_id for run in runs for record in run if record.WhichOneof("record_type") == "run"]
    assert set(ids) == {(run_dir / WANDB_ID_FILE).read_text().strip()}
    steps = [int(row["trainer/global_step"]) for run in runs for row in history(run) if "train/loss" in row]
    assert steps == [1, 3, 5, 7]  # Lightning counts from 0
    names = {name for run in runs for row in history(run) for name in row}
    assert logged(run_dir) <= names
    command = [
        sys.executable,
        "-m",
        "wandb",
        "sync",
        "--dry-run",
        *sorted(map(str, run_dir.glob("wandb/offline-run-*"))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "Would sync 2 run(s)" in done.stdout + done.stderr


def test_wandb_knows_where_the_run_comes_from(run_dir: Path) -> None:
    for run in wandb_runs(run_dir):
        updates = [record.config.update for record in run if record.WhichOneof("record_type") == "config"]
        config = {key: json.loads(value) for update in updates for key, value in items(update).items()}
        assert config["target_fingerprint"] == inspect_target(TargetOptions(str(TARGET))).fingerprint
        assert {"vllm", "torch", "lightning", "eagle3_lightning"} <= set(config["versions"])
        assert config["git"] is None or set(config["git"]) == {"commit", "dirty"}
        assert config["model"]["loss"]["ttt_steps"] == TTT_STEPS
        assert config["data"]["queue"]["block_tokens"] == 32


def test_the_preview_comes_before_the_first_step(run_dir: Path) -> None:
    rows = history(wandb_runs(run_dir)[0])
    assert "data/preview/_type" in rows[0]
    assert rows[0]["trainer/global_step"] == "0"
    assert "train/loss" not in rows[0]
    tables = list(run_dir.glob("wandb/offline-run-*/files/media/table/data/preview_0_*.json"))
    assert len(tables) == 2  # each start shows what it trains on first
    assert all("Tell me about" in table.read_text() for table in tables)


def test_the_draft_is_an_artifact_or_a_path(run_dir: Path) -> None:
    artifacts = [
        (set(record.artifact.aliases), {entry.path for entry in record.artifact.manifest.contents})
        for run in wandb_runs(run_dir)
        for record in run
        if record.WhichOneof("record_type") == "artifact" and record.artifact.type == "draft"
    ]
    assert [aliases for aliases, _ in artifacts] == [{"best", "latest"}, {"last", "latest"}] * 2
    assert all("model.safetensors" in files for _, files in artifacts)
    summary = {}
    for record in wandb_runs(run_dir)[-1]:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    draft = json.loads(summary["draft_last"])
    assert draft["path"] == str(run_dir / "export")
    assert (draft["artifact"], draft["step"]) == (True, 8)
    assert json.loads(summary["draft_best"])["step"] == 6


def test_tensorboard_holds_the_same_curves(run_dir: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags: set[str] = set()
    for file in run_dir.glob("lightning_logs/*/events.*"):
        events = EventAccumulator(str(file))
        events.Reload()
        tags |= set(events.Tags()["scalars"])
    assert logged(run_dir) <= tags


def test_the_summary_and_the_report(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["served_acceptance_length"] >= 1
    curves = read_curves(run_dir)
    assert [step for step, _ in curves["serve/acceptance_length"]] == [6]
    assert main(["report", str(run_dir)]) == 0
    page = (run_dir / "report.html").read_text()
    assert "Tell me about" in page
    assert "vllm serve" in page


def test_vllm_holds_as_many_tokens_as_the_plan_says(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"KV cache size: ([\d,]+) tokens", (run_dir / "vllm.log").read_text())
    assert found
    assert main(["plan", "--config", str(run_dir.parent / "config.yaml"), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["kv_cache"]["num_tokens"]
    assert int(found[1].replace(",", "")) == pytest.approx(planned, rel=0.003)  # vLLM's are whole blocks
