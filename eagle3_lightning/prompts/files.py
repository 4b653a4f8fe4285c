"""JSONL and JSON files of prompts, with random access by row, in memory that does not grow with a JSONL file.

A JSONL file is read once at the start: every line is decoded, so that broken ones are known by number before vLLM
starts. Kept are a bit for each line and the byte offset of every n-th (n doubles when they are too many); rows are read
from disk when needed.
"""

import hashlib
import json
import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.prompts.records import Record, RecordError, parse_record

_MAX_OFFSETS = 65_536
_BLOCK_BITS = 4096
MAX_CHECKED_RECORDS = 100_000  # deeper checks than JSON cost a second per million
MAX_NAMED_FAULTS = 5


def fields_key(fields: Mapping[str, str]) -> bytes:
    """Of the names of the keys, which decide what a row holds as much as its bytes do; empty where none are given."""
    return json.dumps(dict(fields), sort_keys=True).encode() if fields else b""


# Decides from a row's bytes whether it belongs to the rows that are asked for (the train/validation split).
Keep = Callable[[bytes], bool]


@dataclass
class Faults:
    """Rows that cannot be used: how many, and the first few by name."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: RecordError) -> None:
        """Count one."""
        self.count += 1
        if len(self.first) < MAX_NAMED_FAULTS:
            self.first.append(str(error))


class JsonlSource:
    """A file with one JSON object per line."""

    def __init__(
        self, path: Path, option: str, keep: Keep | None = None, fields: Mapping[str, str] | None = None
    ) -> None:
        """Scan the file.

        Args:
            path: the file.
            option: the option that named it, for messages.
            keep: which lines belong to this source; None is all.
            fields: see `parse_record`.

        Raises:
            ConfigError: the file cannot be read.
        """
        self.label, self.path = str(path), path
        self._fields = dict(fields or {})
        self._stride, self._offsets = 1, [0]
        self._kept = _Bits()  # lines that are neither blank nor of the other split
        self.faults = Faults()
        self._lock = threading.Lock()
        try:
            self._file: BinaryIO = path.open("rb")
            self._fingerprint = self._scan(keep)
        except OSError as error:
            raise ConfigError(option, self.label, f"it cannot be read ({error.strerror})", "Check the path.") from error

    def __len__(self) -> int:
        """Lines that are neither blank nor of the other split."""
        return self._kept.num_set

    def read(self, row: int) -> Record:
        """Decode one line.

        Raises:
            RecordError: it is not JSON or not a known format.
        """
        line_number = self._kept.place(row)
        with self._lock:
            self._file.seek(self._offsets[line_number // self._stride])
            for _ in range(line_number % self._stride):
                self._file.readline()
            line = self._file.readline()
        return self._parse(line, line_number)

    def fingerprint(self) -> str:
        """Of the bytes of the lines that belong to this source, and of `fields`."""
        return self._fingerprint

    def _scan(self, keep: Keep | None) -> str:
        digest, offset, checked = hashlib.blake2b(fields_key(self._fields), digest_size=16), 0, 0
        for number, line in enumerate(self._file):
            if number % self._stride == 0 and number:
                self._offsets.append(offset)
                if len(self._offsets) > _MAX_OFFSETS:
                    self._offsets, self._stride = self._offsets[::2], self._stride * 2
            offset += len(line)
            kept = not line.isspace() and (keep is None or keep(line))
            self._kept.append(kept)
            if not kept:
                continue
            digest.update(line)
            checked += 1
            try:
                if checked <= MAX_CHECKED_RECORDS:
                    self._parse(line, number)
                else:
                    self._decode(line, number)
            except RecordError as error:
                self.faults.add(error)
        return digest.hexdigest()

    def _parse(self, line: bytes, number: int) -> Record:
        return parse_record(self._decode(line, number), self._where(number), self._fields)

    def _decode(self, line: bytes, number: int) -> Any:
        try:
            return msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            try:  # the standard library takes lone surrogates, which the record's own check then names
                return json.loads(line.strip())
            except RecursionError as error:
                raise RecordError(self._where(number), "it is nested too deeply") from error
            except json.JSONDecodeError as error:  # its own text would call this line 1
                problem = f"it is not JSON ({error.msg}, character {error.pos + 1})"
                raise RecordError(self._where(number), problem) from error
            except ValueError as error:
                raise RecordError(self._where(number), f"it is not JSON ({error})") from error

    def _where(self, number: int) -> str:
        return f"{self.label}, line {number + 1}"


class _Bits:
    """A bit for each line, and how many are set before each block of them: eighteen million lines in 2.3 MB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._before = array("q")
        self._num = self.num_set = 0

    def append(self, bit: bool) -> None:
        if self._num % _BLOCK_BITS == 0:
            self._before.append(self.num_set)
        if self._num % 8 == 0:
            self._bits.append(0)
        if bit:
            self._bits[-1] |= 1 << self._num % 8
            self.num_set += 1
        self._num += 1

    def place(self, number: int) -> int:
        """Where set bit `number` is."""
        if not 0 <= number < self.num_set:
            raise IndexError(number)
        if self.num_set == self._num:
            return number
        block = bisect_right(self._before, number) - 1
        left, byte = number - self._before[block], block * (_BLOCK_BITS // 8)
        while left >= (count := self._bits[byte].bit_count()):
            left, byte = left - count, byte + 1
        return 8 * byte + [bit for bit in range(8) if self._bits[byte] >> bit & 1][left]


class JsonSource:
    """A file with one JSON array of objects; kept in memory."""

    def __init__(
        self, path: Path, option: str, keep: Keep | None = None, fields: Mapping[str, str] | None = None
    ) -> None:
        """Load the file. See `JsonlSource`."""
        self.label, self.path = str(path), path
        self._fields = dict(fields or {})
        self.faults = Faults()
        try:
            content = json.loads(path.read_bytes())
            encoded = [(number, json.dumps(row, sort_keys=True).encode()) for number, row in enumerate(content)]
        except OSError as error:
            raise ConfigError(option, self.label, f"it cannot be read ({error.strerror})", "Check the path.") from error
        except RecursionError as error:
            raise ConfigError(
                option, self.label, "it is nested too deeply", "Write one JSON object per line, without deep nesting."
            ) from error
        except ValueError as error:
            raise ConfigError(
                option,
                self.label,
                f"it starts like a JSON array and is not JSON ({error})",
                "Repair the file, or write one JSON object per line.",
            ) from error
        kept = [(number, data) for number, data in encoded if keep is None or keep(data)]
        self._rows = [(number, content[number]) for number, _ in kept]
        rows = b"\n".join(data for _, data in kept)
        self._fingerprint = hashlib.blake2b(fields_key(self._fields) + rows, digest_size=16).hexdigest()
        for row in range(len(self._rows)):
            try:
                self.read(row)
            except RecordError as error:
                self.faults.add(error)

    def __len__(self) -> int:
        """Number of objects in the array that belong to this split."""
        return len(self._rows)

    def read(self, row: int) -> Record:
        """One object. Raises RecordError if its format is not known."""
        number, raw = self._rows[row]
        return parse_record(raw, f"{self.label}, item {number + 1}", self._fields)

    def fingerprint(self) -> str:
        """Of the objects that belong to this source, and of `fields`."""
        return self._fingerprint
