"""safetensors headers, and files read with few system calls: Python's lock is given away and taken back around each.

The format is an 8-byte little-endian length, as many bytes of JSON, and the tensors' bytes end to end.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

_DTYPES: dict[str, tuple[torch.dtype, type | None]] = {  # torch's, and NumPy's where it has one
    "BOOL": (torch.bool, np.bool_),
    "U8": (torch.uint8, np.uint8),
    "I8": (torch.int8, np.int8),
    "I16": (torch.int16, np.int16),
    "I32": (torch.int32, np.int32),
    "I64": (torch.int64, np.int64),
    "U16": (torch.uint16, np.uint16),
    "U32": (torch.uint32, np.uint32),
    "U64": (torch.uint64, np.uint64),
    "F8_E4M3": (torch.float8_e4m3fn, None),
    "F8_E5M2": (torch.float8_e5m2, None),
    "F16": (torch.float16, np.float16),
    "BF16": (torch.bfloat16, None),
    "F32": (torch.float32, np.float32),
    "F64": (torch.float64, np.float64),
}
LENGTH_BYTES = 8
_HEAD_BYTES = 32 << 10  # at once: the header, and the token ids of a few thousand tokens


class TensorFileError(ValueError):
    """A file that is no whole safetensors file, or not the one that it was."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        kind: its dtype, as the format names it.
        shape: of the tensor.
        start: first byte, from the file's beginning.
        end: behind its last byte.
    """

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        """As torch names it."""
        return _DTYPES[self.kind][0]


def parse_header(header: bytes, header_end: int) -> tuple[dict[str, str], dict[str, Entry]]:
    """Metadata, and where each tensor lies; neither the length of the file nor the dtypes are looked at.

    Args:
        header: the JSON.
        header_end: where the tensors' bytes begin.

    Raises:
        TensorFileError: it is none.
    """
    try:
        content = json.loads(header)
        metadata = content.pop("__metadata__", {})
        entries = {name: _entry(facts, header_end) for name, facts in content.items()}
        fits = all(isinstance(value, str) for value in metadata.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise TensorFileError(f"its header is damaged ({type(error).__name__})") from error
    if not fits:
        raise TensorFileError("its header is damaged (metadata)")
    return metadata, entries


def _entry(facts: dict[str, Any], header_end: int) -> Entry:
    (start, end), shape = facts["data_offsets"], tuple(facts["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError("sizes and places are whole numbers")
    return Entry(str(facts["dtype"]), shape, header_end + start, header_end + end)


class TensorFile:
    """What a file holds, and small tensors of it; it is open only while it is read."""

    def __init__(self, path: Path, small: Sequence[str]) -> None:
        """Read the header.

        Args:
            path: the file.
            small: tensors that `values` will be asked for; those that are not there are passed over.

        Raises:
            TensorFileError: cut short, or not such a file.
            OSError: missing, or not to be read.
        """
        self.path = path
        with _opened(path) as fd:
            self._identity = _identity(fd)
            size_bytes = self._identity[1]
            head = os.pread(fd, _HEAD_BYTES, 0)
            header_end = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little")
            if not LENGTH_BYTES < header_end <= size_bytes:
                raise TensorFileError(f"its {size_bytes} bytes are too few for the header, or it is not of safetensors")
            if header_end > len(head):
                head += _read(fd, len(head), header_end)
            self.metadata, self.entries = parse_header(head[LENGTH_BYTES:header_end], header_end)
            _check_places(self.entries, header_end, size_bytes)
            self._small: dict[str, bytes] = {}
            for name in small:
                if (entry := self.entries.get(name)) is not None:
                    inside = entry.end <= len(head)
                    self._small[name] = head[entry.start : entry.end] if inside else _read(fd, entry.start, entry.end)

    def __getitem__(self, name: str) -> Entry:
        """Where a tensor lies."""
        if name not in self.entries:
            raise TensorFileError(f"it has no tensor {name}")
        return self.entries[name]

    def values(self, name: str) -> np.ndarray:
        """One of the small tensors."""
        entry = self[name]
        values = _DTYPES[entry.kind][1]
        if values is None:
            raise TensorFileError(f"its {name} are of {entry.kind}")
        return np.frombuffer(self._small[name], values).reshape(entry.shape)

    def read_into(self, parts: Sequence[tuple[str, memoryview]]) -> None:
        """Read tensors into buffers of their size; those that lie end to end in one go.

        Args:
            parts: names, in the order of their places, each with its buffer of bytes.

        Raises:
            TensorFileError: it was changed since its header was read.
            OSError: it is gone, or cannot be read.
        """
        pending = [(self[name].start, buffer) for name, buffer in parts if len(buffer)]
        with _opened(self.path) as fd:
            if _identity(fd) != self._identity:
                raise TensorFileError("it was changed while it was in use")
            while pending:
                place = end = pending[0][0]
                together = []
                for start, buffer in pending:
                    if start != end:
                        break
                    together.append(buffer)
                    end += len(buffer)
                got = os.preadv(fd, together, place)
                if got == 0:
                    raise TensorFileError(f"it ends at byte {place}")
                while pending and got >= len(pending[0][1]):
                    got -= len(pending.pop(0)[1])
                if got:  # the kernel gives no more than 2 GiB at once
                    start, buffer = pending[0]
                    pending[0] = (start + got, buffer[got:])


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, int, int]:
    found = os.fstat(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(fd: int, start: int, end: int) -> bytes:
    data = os.pread(fd, end - start, start)
    if len(data) != end - start:
        raise TensorFileError(f"it ends at byte {start + len(data)}")
    return data


def _check_places(entries: dict[str, Entry], header_end: int, size_bytes: int) -> None:
    place = header_end
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.kind not in _DTYPES:
            raise TensorFileError(f"its header is damaged (the dtype of {name})")
        if entry.start != place or entry.end - entry.start != prod(entry.shape) * entry.dtype.itemsize:
            raise TensorFileError(f"its header is damaged (the place of {name})")
        place = entry.end
    if place != size_bytes:
        raise TensorFileError(f"it has {size_bytes} bytes and its header says {place}")
