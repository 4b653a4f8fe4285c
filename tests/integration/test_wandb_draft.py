"""The draft in a real offline W&B run: sent whole, or only named where it is larger than allowed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from wandb_file import items, whole_run

from eagle3_lightning.callbacks.wandb_draft import record_draft

MIB = 2**20


@pytest.mark.parametrize(("max_mib", "sent"), [(2.0, True), (1.0, False), (0.0, False)])
def test_a_large_draft_is_named_and_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_mib: float, sent: bool
) -> None:
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path))
    import wandb

    export = tmp_path / "export"
    export.mkdir()
    (export / "model.safetensors").write_bytes(bytes(MIB))
    (export / "config.json").write_text("{}")
    logger = WandbLogger(save_dir=tmp_path, project="p", id="abc", offline=True)
    trainer: Any = SimpleNamespace(loggers=[CSVLogger(tmp_path), logger])
    record_draft(trainer, export, "last", max_mib, {"step": 7, "target_fingerprint": "f"})
    wandb.finish()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-abc.wandb")
    found = whole_run(file)
    artifacts = [record.artifact for record in found if record.WhichOneof("record_type") == "artifact"]
    assert [a.name for a in artifacts] == (["draft-abc"] if sent else [])
    for artifact in artifacts:
        assert {entry.path for entry in artifact.manifest.contents} == {"model.safetensors", "config.json"}
        assert json.loads(artifact.metadata) == {"step": 7, "target_fingerprint": "f"}
    summary: dict[str, str] = {}
    for record in found:
        if record.WhichOneof("record_type") == "summary":
            summary |= items(record.summary.update)
    named = json.loads(summary["draft_last"])
    assert (named["path"], named["artifact"], named["step"], named["size_mib"]) == (str(export), sent, 7, 1.0)
