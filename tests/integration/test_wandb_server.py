"""A fit on stored states, without vLLM, against a server on this machine that knows enough of W&B's to begin a run."""

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from wandb_file import items, records

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from toy_target import make_target

pytest.importorskip("wandb")
STEPS = 20
RUN = {
    "id": "r", "name": "abc", "displayName": "abc", "config": "{}", "wandbConfig": "{}", "summaryMetrics": "{}",
    "historyLineCount": 0, "logLineCount": 0, "eventsLineCount": 0, "history": "[]", "events": "[]", "tags": [],
    "createdAt": "2026-01-01T00:00:00", "project": {"id": "p", "name": "p", "entity": {"id": "e", "name": "me"}},
}  # fmt: skip
ANSWERS = {
    "viewer": {"id": "v", "username": "me", "email": "e", "entity": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {"max_cli_version": "0.99"}, "latestLocalVersionInfo": None, "features": []},
    "upsertBucket": {"bucket": RUN, "inserted": True},
    "project": {"bucket": RUN, "run": RUN, "artifact": None},
}


class Server(ThreadingHTTPServer):
    """Answers until the run has begun, and then closes every connection; or knows no key at all."""

    daemon_threads = True

    def __init__(self, knows_the_key: bool) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.knows_the_key, self.gone, self.refused = knows_the_key, False, 0


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._answer(200, {})

    def do_POST(self) -> None:
        if self.server.gone:
            self.server.refused += 1
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if not self.server.knows_the_key:
            self._answer(401, {"errors": [{"message": "user is not logged in"}]})
        elif self.path == "/graphql":
            self._answer(200, {"data": ANSWERS})
            self.server.gone = re.search(r"mutation\s+UpsertBucket", json.loads(body)["query"]) is not None
        else:
            self._answer(200, {})

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(knows_the_key: bool) -> Iterator[Server]:
    with Server(knows_the_key) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def fit(tmp_path: Path, server: Server) -> "subprocess.CompletedProcess[str]":
    """With W&B's waits cut short: 2 s for an answer, 3 s for the end of the run."""
    states = tmp_path / "states"
    states.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        sample = {
            "input_ids": torch.randint(0, 200, (12,), generator=generator),
            "loss_mask": torch.ones(12),
            "hidden_states": [torch.randn(12, 8, generator=generator) for _ in range(4)],
        }
        torch.save(sample, states / f"data_{number}.pt")
    source = [{"path": str(states), "layers": [1, 3, 4], "layer_convention": "output"}]
    command = [
        *(sys.executable, "-m", "eagle3_lightning", "fit", f"--run_dir={tmp_path / 'run'}", "--target.layers=[1,3,4]"),
        *(f"--target.path={make_target(tmp_path / 'target')}", "--model.draft.draft_vocab_size=64"),
        *("--data.prompts.train", json.dumps(source), "--data.batch.pack_tokens=64", "--model.optim.warmup_steps=1"),
        *(f"--trainer.max_steps={STEPS}", "--trainer.accelerator=cpu", "--trainer.logger=WandbLogger"),
        "--trainer.log_every_n_steps=1",
    ]
    environment = {name: value for name, value in os.environ.items() if "WANDB" not in name} | {
        "WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}",
        "WANDB_API_KEY": "x" * 40,
        "WANDB_HTTP_TIMEOUT": "2",
        "WANDB_FINISH_TIMEOUT": "3",
        "WANDB_DATA_DIR": str(tmp_path),
    }
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def test_a_server_that_fails_does_not_end_the_run(tmp_path: Path) -> None:
    with serving(knows_the_key=True) as server:
        done = fit(tmp_path, server)
    run_dir = tmp_path / "run"
    assert done.returncode == 0, done.stderr
    assert server.gone and server.refused > 0
    for what in ("the preview", f"the draft in {run_dir / 'export'}"):
        assert f"W&B did not take {what} (" in done.stderr
    assert "Timed out finishing run" in done.stderr
    assert "wandb sync" in done.stderr
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == STEPS
    assert (run_dir / "export" / "model.safetensors").is_file()
    # What `wandb sync` sends is on the disk, all of it.
    (file,) = run_dir.glob("wandb/run-*/run-*.wandb")
    history = [items(record.history.item) for record in records(file) if record.WhichOneof("record_type") == "history"]
    logged = [int(row["trainer/global_step"]) for row in history if "train/loss" in row]
    assert logged == list(range(STEPS))


def test_a_key_that_the_server_does_not_know_is_one_line(tmp_path: Path) -> None:
    with serving(knows_the_key=False) as server:
        done = fit(tmp_path, server)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("eagle3 fit: ")]
    assert line.startswith("eagle3 fit: trainer.logger = 'WandbLogger': W&B does not begin its run (")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "preview.html").exists()
