"""The safetensors of a checkpoint, one file or many, as one mapping from names to tensors.

Headers are all that sizes and fingerprints need; tensors are read with safetensors itself, memory-mapped.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.stream.tensor_file import LENGTH_BYTES, Entry, TensorFileError, parse_header

OPTION = "target.path"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_READERS, _READ_BYTES = 16, 128  # a network file system answers many small reads at once


class CheckpointFiles:
    """Names, shapes and bytes of all tensors of a checkpoint directory."""

    def __init__(
        self, directory: Path, given: str, option: str = OPTION, remedy: str = "Download the checkpoint again."
    ) -> None:
        """Read the headers of all `*.safetensors`.

        Args:
            directory: the checkpoint.
            given: the checkpoint as the user named it, for messages.
            option: the option that named it.
            remedy: against files that are broken or missing.

        Raises:
            ConfigError: there is none, one is cut short or cannot be read, or the index names one that is missing.
        """
        self._given, self._option, self._remedy = given, option, remedy
        paths = sorted(directory.glob("*.safetensors"))
        if (index := directory / "model.safetensors.index.json").is_file():
            paths = self._indexed(index)
        if not paths:
            raise ConfigError(
                self._option,
                given,
                "it holds no safetensors",
                "Convert the checkpoint with save_pretrained(..., safe_serialization=True).",
            )
        self._entries: dict[str, Entry] = {}
        self._file_of: dict[str, Path] = {}
        for path in paths:
            entries = self._read_header(path)
            self._entries.update(entries)
            self._file_of.update(dict.fromkeys(entries, path))

    def find(self, endings: Sequence[str], what: str) -> str:
        """The one tensor whose name ends in one of `endings`, earlier endings first.

        Extra copies inside decoder layers (multi-token prediction heads) are passed over, and of several the shortest
        name is the language model's own.
        """
        name = self._search(endings)
        if name is not None:
            return name
        raise ConfigError(
            self._option,
            self._given,
            f"none of its tensors is an {what} ({', '.join(endings)})",
            "Choose a decoder-only language model with a full, unquantized embedding and lm_head.",
        )

    def has(self, endings: Sequence[str]) -> bool:
        """Whether `find` would find one."""
        return self._search(endings) is not None

    def _search(self, endings: Sequence[str]) -> str | None:
        for ending in endings:
            found = [n for n in self._entries if n == ending or n.endswith("." + ending)]
            outside = [n for n in found if ".layers." not in n and ".vision" not in n and "vision_" not in n]
            if outside:
                return min(outside, key=lambda n: (len(n), n))
        return None

    def check_matrix(self, name: str, rows: int, columns: int) -> None:
        """Refuse a tensor that cannot be used as [rows, columns] of floats (more rows are padding and allowed)."""
        entry = self._entries[name]
        if entry.kind not in _DTYPES:
            raise ConfigError(
                self._option,
                self._given,
                f"{name} is stored as {entry.kind}, so it is quantized",
                "Use a checkpoint that keeps embedding and lm_head in bfloat16, float16 or float32.",
            )
        if len(entry.shape) != 2 or entry.shape[0] < rows or entry.shape[1] != columns:
            raise ConfigError(
                self._option,
                self._given,
                f"{name} has shape {list(entry.shape)} and config.json says [{rows}, {columns}]",
                "Check that weights and config.json belong together.",
            )
        self.refuse_bias(name)

    def refuse_bias(self, name: str) -> None:
        """Refuse a tensor that has a bias beside it, which nothing here can express."""
        if (bias := name.removesuffix("weight") + "bias") in self._entries:
            raise ConfigError(
                self._option,
                self._given,
                f"it has {bias}, which a draft or a stored state cannot express",
                "Choose a target without it.",
            )

    def dtype(self, name: str) -> str:
        """The tensor's dtype as torch names it, for example `bfloat16`."""
        return _DTYPES[self._entries[name].kind]

    def load(self, name: str) -> Tensor:
        """The tensor, memory-mapped, on the CPU."""
        with safe_open(self._file_of[name], framework="pt") as file:
            return file.get_tensor(name)

    def headers(self) -> list[list[Any]]:
        """Name, dtype and shape of every tensor, by name: the same for a checkpoint in one file or in many."""
        return [[name, entry.kind, list(entry.shape)] for name, entry in sorted(self._entries.items())]

    def sample(self, places: Mapping[str, int]) -> dict[str, bytes]:
        """Some of the data of tensors: `_READ_BYTES` at each of so many evenly spaced places, the first and last too.

        Args:
            places: of each tensor that is read; one that is no longer than its places together is read whole.

        Returns:
            The bytes of each tensor, those of its places end to end.
        """
        opened: dict[Path, int] = {}
        try:
            for path in {self._file_of[name] for name in places}:
                opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                os.posix_fadvise(opened[path], 0, 0, os.POSIX_FADV_RANDOM)  # or each read brings its neighbourhood
            names = sorted(places, key=lambda name: (self._file_of[name], self._entries[name].start))
            with ThreadPoolExecutor(_READERS) as pool:
                read = pool.map(lambda n: _read_places(opened[self._file_of[n]], self._entries[n], places[n]), names)
                return dict(zip(names, read, strict=True))
        finally:
            for descriptor in opened.values():
                os.close(descriptor)

    def _indexed(self, index: Path) -> list[Path]:
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise TypeError("a file's name is not text")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                self._option, self._given, f"its {index.name} cannot be read ({error})", self._remedy
            ) from error
        missing = [name for name in names if not (index.parent / name).is_file()]
        if missing:
            raise ConfigError(
                self._option,
                self._given,
                f"{len(missing)} of its {len(names)} weight files are missing, the first is {missing[0]}",
                self._remedy,
            )
        return [index.parent / name for name in names]

    def _read_header(self, path: Path) -> dict[str, Entry]:
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
                if size < LENGTH_BYTES or header_bytes > min(size, _MAX_HEADER_BYTES):
                    raise self._broken(path)
                _, entries = parse_header(file.read(header_bytes), LENGTH_BYTES + header_bytes)
        except TensorFileError as error:
            raise self._broken(path) from error
        except OSError as error:
            problem = f"{path.name} cannot be read ({error.strerror})"
            raise ConfigError(self._option, self._given, problem, "Check the path and its rights.") from error
        if any(entry.end > size for entry in entries.values()):
            raise self._broken(path)
        return entries

    def _broken(self, path: Path) -> ConfigError:
        return ConfigError(
            self._option,
            self._given,
            f"{path.name} is not a safetensors file or is cut short",
            self._remedy,
        )


def _read_places(descriptor: int, entry: Entry, places: int) -> bytes:
    size = entry.end - entry.start
    if size <= places * _READ_BYTES:
        return os.pread(descriptor, size, entry.start)
    offsets = [i * (size - _READ_BYTES) // (places - 1) for i in range(places)]
    return b"".join(os.pread(descriptor, _READ_BYTES, entry.start + offset) for offset in offsets)
