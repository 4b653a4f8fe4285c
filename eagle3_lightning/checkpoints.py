"""Checkpoint files: read with one guard for `eagle3 fit`, `validate` and `export`, and written whole or not at all."""

import os
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO

from eagle3_lightning.errors import CheckpointError, ConfigError
from eagle3_lightning.fingerprint import EARLIER_FORM, is_earlier_form

if TYPE_CHECKING:
    from eagle3_lightning.draft.config import DraftConfig
    from eagle3_lightning.layers import LayerPlan
    from eagle3_lightning.target import TargetInfo

REMEDY = "Give a .ckpt that eagle3 fit wrote."
_RECORD: dict[str, type | tuple[type, ...]] = {
    "target_fingerprint": str,
    "target_name": str,
    "draft": dict,
    "aux_layers": list,
    "vocab_coverage": (float, int),
}


def read_checkpoint(file: str | Path, option: str = "--ckpt") -> dict[str, Any]:
    """What a checkpoint of this project holds, its tensors still on the disk.

    Args:
        file: the file.
        option: the option that named it, for messages.

    Raises:
        ConfigError: no such file, not a checkpoint, cut short, or not written by `eagle3 fit`.
    """
    if not Path(file).is_file():
        raise ConfigError(option, str(file), "there is no such file", REMEDY)
    if not _is_archive(file):
        raise ConfigError(
            option, str(file), "it cannot be read as a checkpoint (no archive of torch.save, or cut short)", REMEDY
        )
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what a foreign pickle or archive raises is not documented
        raise ConfigError(option, str(file), f"it cannot be read as a checkpoint ({reason(error)})", REMEDY) from error
    if not isinstance(saved, dict):
        raise ConfigError(option, str(file), f"it holds a {type(saved).__name__}, not a checkpoint", REMEDY)
    if fault := record_fault(saved):
        raise ConfigError(option, str(file), fault, REMEDY)
    return saved


def _is_archive(file: str | Path) -> bool:
    try:
        return zipfile.is_zipfile(file)
    except OSError:
        return True  # torch.load says why it cannot be read


def record_fault(checkpoint: Mapping[str, Any]) -> str | None:
    """What is wrong with the record that `eagle3 fit` adds to a checkpoint; None if nothing is."""
    record = checkpoint.get("eagle3")
    if record is None:
        return "it was not written by eagle3 fit"
    if not isinstance(record, dict):
        return f"its record `eagle3` is a {type(record).__name__}"
    for key, kind in _RECORD.items():
        if key not in record:
            return f"its record `eagle3` has no {key}"
        if not isinstance(record[key], kind):
            return f"{key} in its record `eagle3` is a {type(record[key]).__name__}"
    return None


def check_record(
    checkpoint: Mapping[str, Any],
    target: "TargetInfo",
    draft: "DraftConfig",
    layers: "LayerPlan",
    init_from: str | None = None,
) -> dict[str, Any]:
    """Refuse the checkpoint of another target, of other layers or of another draft.

    Args:
        checkpoint: what was read.
        target: of the run.
        draft: likewise.
        layers: likewise.
        init_from: what training shall start from; nothing but what the checkpoint's did.

    Returns:
        The record that `eagle3 fit` added to it.

    Raises:
        ConfigError: see above, or a file that `eagle3 fit` did not write.
    """
    if fault := record_fault(checkpoint):
        raise ConfigError("ckpt_path", "checkpoint", fault, REMEDY)
    record: dict[str, Any] = checkpoint["eagle3"]
    if is_earlier_form(record["target_fingerprint"]):
        raise ConfigError(
            "ckpt_path",
            record["target_name"],
            f"the checkpoint's fingerprint of the target is {EARLIER_FORM}",
            "Go on with the version that wrote the checkpoint.",
        )
    if record["target_fingerprint"] != target.fingerprint:
        raise ConfigError(
            "ckpt_path",
            record["target_name"],
            f"the checkpoint belongs to another target than {target.name}",
            "Give the target it was trained on.",
        )
    for option, then, now in (
        ("model.draft", record["draft"], draft.as_dict()),
        ("target.layers", record["aux_layers"], list(layers.aux)),
    ):
        if then != now:
            raise ConfigError(
                option,
                _difference(now, then),
                f"the checkpoint was trained with {_difference(then, now)}",
                "Use the checkpoint's own settings, or start a new run.",
            )
    began = record.get("init_from")
    if init_from is not None and (began is None or Path(init_from).absolute() != Path(began).absolute()):
        problem = f"the checkpoint's training started from {began or 'random weights'}, and has weights of its own"
        raise ConfigError("model.init_from", init_from, problem, "Leave it out, or start a new run.")
    return record


def _difference(a: Any, b: Any) -> Any:
    """What of `a` is not so in `b`."""
    return {k: v for k, v in a.items() if b.get(k) != v} if isinstance(a, dict) else a


def reason(error: Exception) -> str:
    """The first line of an error with its kind, which is all there is where it has no text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


class WholeFileIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, has it on the disk and only then renames it.

    Lightning 2.6 writes it into the system's temporary directory and moves it; from another file system that is a copy
    over the earlier file, which a full disk or a kill leaves torn.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Called on rank 0.

        Raises:
            CheckpointError: it could not be written; a file of that name is as it was.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")  # one name: what a kill leaves is written over
        writer: _Writer | None = None
        try:
            with partial.open("wb") as file:
                writer = _Writer(file)
                torch.save(checkpoint, writer)  # type: ignore[arg-type]
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
            _sync_directory(path.parent)
        except (OSError, RuntimeError) as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            cause = (writer and writer.error) or error
            raise CheckpointError(
                f"the checkpoint {path} could not be written ({reason(cause)}); an earlier one is as it was. Free some "
                "space and go on from it with --ckpt_path."
            ) from error


class _Writer:
    """A file for torch.save, whose own error hides that of the disk."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
