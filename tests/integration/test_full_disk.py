"""A file system that is really full: what was written before it filled up stays whole. No vLLM here."""

import hashlib
import sys
from pathlib import Path

import pytest
import torch
from fault_support import fill, small_disk

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import export_support

from eagle3_lightning.checkpoints import WholeFileIO
from eagle3_lightning.errors import CheckpointError, ConfigError
from eagle3_lightning.export.speculators import export_draft
from eagle3_lightning.run_directory import RunLock
from eagle3_lightning.summary import update_summary


def contents(directory: Path) -> dict[str, str]:
    """A digest of every file."""
    files = (file for file in directory.rglob("*") if file.is_file() and file.name != "filler")
    return {str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_an_export_on_a_full_disk_leaves_the_earlier_one_whole(tmp_path: Path) -> None:
    target = export_support.make_target(tmp_path / "target")
    with small_disk(tmp_path / "disk", "1m") as disk:

        def export(seed: int) -> None:
            draft = export_support.make_draft(target)
            torch.nn.init.normal_(draft.fc.weight, std=0.1 * seed)
            export_draft(
                draft, disk / "export", target=target, layers=export_support.LAYERS, target_name="org/target",
                num_speculative_tokens=3, vllm_version=None,
            )  # fmt: skip

        export(1)
        first = contents(disk)
        assert "export/model.safetensors" in first
        filler = fill(disk)
        free = filler.stat().st_size
        # From no byte at all to all but the last page: it fails at every one of the files, the rename's sync included.
        for spared in (0, 4096, 8192, 16384, 32768):
            with filler.open("r+b") as file:
                file.truncate(free - spared)
            with pytest.raises(ConfigError, match=r"No space left on device.*an earlier export there is untouched"):
                export(2)
            assert contents(disk) == first
            assert sorted(path.name for path in disk.iterdir()) == ["export", "filler"]
        filler.unlink()
        export(2)
        second = contents(disk)
        assert second.keys() == first.keys()
        assert second["export/model.safetensors"] != first["export/model.safetensors"]


@pytest.mark.parametrize("spared", [0, 4096, 40960])
def test_a_checkpoint_on_a_full_disk_leaves_the_earlier_one_whole(tmp_path: Path, spared: int) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        file, io = disk / "checkpoints" / "last.ckpt", WholeFileIO()
        io.save_checkpoint({"weights": torch.zeros(50_000), "step": 1}, file)
        filler = fill(disk)
        with filler.open("r+b") as held:
            held.truncate(filler.stat().st_size - spared)
        with pytest.raises(CheckpointError, match=r"last.ckpt could not be written .*No space left on device"):
            io.save_checkpoint({"weights": torch.ones(50_000), "step": 2}, file)
        assert [path.name for path in file.parent.iterdir()] == ["last.ckpt"]
        assert torch.load(file)["step"] == 1
        assert not torch.load(file)["weights"].any()
        filler.unlink()
        io.save_checkpoint({"weights": torch.ones(50_000), "step": 2}, file)
        assert torch.load(file)["weights"].all()


def test_a_summary_on_a_full_disk_is_the_earlier_one(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        file = disk / "summary.json"
        update_summary(file, {"steps": 1})
        fill(disk)
        with pytest.raises(OSError, match="No space left on device"):
            update_summary(file, {"steps": 2, "names": ["x" * 100] * 100})
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "summary.json"]
        assert file.read_text() == '{\n  "steps": 1\n}\n'


def test_a_run_directory_on_a_full_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        lock = RunLock()
        with pytest.raises(ConfigError, match="No space left on device"):
            lock.acquire(disk / "run")
        lock.release()
