"""Prompts in Parquet and Arrow: files, directories that `datasets` saved, and data sets of the hub.

All of them are read through the `datasets` library, which maps Arrow files into memory: random access costs nothing
and memory does not grow. Streaming is for what should not be stored first; it is read in order, with a shuffle buffer.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import SourceOptions
from eagle3_lightning.prompts.files import MAX_CHECKED_RECORDS, Faults, Keep, fields_key
from eagle3_lightning.prompts.records import Record, RecordError, parse_record

_SHUFFLE_BUFFER_ROWS = 10_000
_REASON_CHARS = 200
_NAMED_FILES = 3  # of each kind
_ONE_KIND = "Let its files be of one kind with the same keys, or name each as a source of its own."


class TableSource:
    """A data set with random access."""

    def __init__(self, options: SourceOptions, option: str, keep: Keep | None = None) -> None:
        """Open it; a split by hash reads every row once.

        Args:
            options: what to open.
            option: the option that named it, for messages.
            keep: which rows belong to this source; None is all.

        Raises:
            ConfigError: `datasets` is not installed, or cannot open it.
        """
        self.label, self._fields = options.path, options.fields
        self._table = _load(options, option, streaming=False)
        self._kept = [n for n, row in enumerate(self._table) if keep(_encode(row))] if keep is not None else None
        self.faults = Faults()
        for row in range(min(len(self), MAX_CHECKED_RECORDS)):
            try:
                self.read(row)
            except RecordError as error:
                self.faults.add(error)

    def __len__(self) -> int:
        """Rows that belong to this split."""
        return len(self._table) if self._kept is None else len(self._kept)

    def read(self, row: int) -> Record:
        """One row.

        Raises:
            RecordError: its format is not known.
        """
        number = row if self._kept is None else self._kept[row]
        return parse_record(_without_nulls(self._table[number]), f"{self.label}, row {number + 1}", self._fields)

    def fingerprint(self) -> str:
        """As `datasets` computes it, from files and transformations; and of `fields`."""
        kept = "all" if self._kept is None else str(len(self._kept))
        rows = f"{self._table._fingerprint}/{kept}".encode()
        return hashlib.blake2b(rows + fields_key(self._fields), digest_size=16).hexdigest()


class StreamSource:
    """A data set that is read in order, pass after pass, each in an order of its own."""

    def __init__(self, options: SourceOptions, option: str, keep: Keep | None = None, seed: int = 0) -> None:
        """Open it; nothing is read yet. See `TableSource`; `seed` is of the shuffle."""
        self.label, self._fields = options.path, options.fields
        self._subset, self._split = options.subset or "", options.split
        self._stream = _load(options, option, streaming=True)
        self._keep, self._seed = keep, seed
        self.faults = Faults()

    def rows(self, skip: int = 0) -> Iterator[Record | RecordError]:
        """Records without end, and errors where a row cannot be used.

        Args:
            skip: rows of this split that were taken before. They are read again: a shuffle buffer has no shortcut.
        """
        number = 0
        for epoch in range(1 << 30):
            found = False
            for row in self._stream.shuffle(seed=self._seed + epoch, buffer_size=_SHUFFLE_BUFFER_ROWS):
                if self._keep is not None and not self._keep(_encode(row)):
                    continue
                found = True
                number += 1
                if number <= skip:
                    continue
                where = f"{self.label}, row {number} of the stream"
                try:
                    yield parse_record(_without_nulls(row), where, self._fields)
                except RecordError as error:
                    yield error
            if not found:
                return

    def fingerprint(self) -> str:
        """Of its name, subset, split and `fields`: what a stream holds is known only at its end."""
        name = "/".join([self.label, self._subset, self._split]).encode()
        return hashlib.blake2b(name + fields_key(self._fields), digest_size=16).hexdigest()


def _load(options: SourceOptions, option: str, streaming: bool) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            option, options.path, "reading it needs the package `datasets`", "pip install datasets."
        ) from error
    path = Path(options.path).expanduser()
    try:
        if path.is_file():
            kind = {".parquet": "parquet", ".arrow": "arrow"}[path.suffix]
            return datasets.load_dataset(kind, data_files=[str(path)], split="train", streaming=streaming)
        if (path / "dataset_dict.json").is_file():
            return _streamed(datasets.load_from_disk(str(path))[options.split], streaming)
        if (path / "dataset_info.json").is_file():
            return _streamed(datasets.load_from_disk(str(path)), streaming)
        name = str(path) if path.is_dir() else options.path
        return datasets.load_dataset(name, options.subset, split=options.split, streaming=streaming)
    except Exception as error:  # `datasets` raises anything from a KeyError to its own builders' errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        problem, remedy = f"`datasets` cannot open it ({reason})", "Check the name, its subset and its split."
        if path.is_dir():
            problem, remedy = f"{problem}{_why(error)}; it holds {_files(path)}", _ONE_KIND
        raise ConfigError(option, options.path, problem, remedy) from error


def _why(error: Exception) -> str:
    """What is behind `datasets`' "an error occurred", which names no key."""
    cause = error.__cause__ or error.__context__
    return f": {' '.join(str(cause).split())[:_REASON_CHARS]}" if cause is not None and str(cause).strip() else ""


def _files(directory: Path) -> str:
    """The first files of each kind, which `datasets` reads as one table."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(file for file in directory.rglob("*") if file.is_file() and not file.name.startswith(".")):
        kinds.setdefault(file.suffix, []).append(file.relative_to(directory))
    shown = [str(file) for files in kinds.values() for file in files[:_NAMED_FILES]]
    number = sum(map(len, kinds.values()))
    return ", ".join(shown) + (f" and {number - len(shown)} more" if number > len(shown) else "")


def _streamed(table: Any, streaming: bool) -> Any:
    return table.to_iterable_dataset() if streaming else table


def _encode(row: dict[str, Any]) -> bytes:
    return msgspec.json.encode(row, order="sorted", enc_hook=str)


def _without_nulls(value: Any) -> Any:
    """Without the keys that Arrow adds as null because other rows have them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
