"""Reads an offline W&B run as `wandb sync` does: a log of records in blocks of 32 KiB (LevelDB's format)."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES, FILE_HEADER_BYTES, RECORD_HEADER = 32768, 7, struct.Struct("<IHB")
WHOLE, LAST = 1, 4
FLUSH_TIMEOUT_S = 60.0


def records(file: Path) -> Iterator[Any]:
    """The records of `run-ID.wandb`, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, payload = file.read_bytes(), FILE_HEADER_BYTES, b""
    assert data.startswith(b":W&B")
    while place < len(data):
        left = BLOCK_BYTES - place % BLOCK_BYTES
        if left < RECORD_HEADER.size:
            place += left
            continue
        _, length, kind = RECORD_HEADER.unpack_from(data, place)
        place += RECORD_HEADER.size
        payload += data[place : place + length]
        place += length
        if kind in (WHOLE, LAST):
            yield Record.FromString(payload)
            payload = b""


def whole_run(file: Path) -> list[Any]:
    """All records of a run that this process has finished; W&B's service writes the last ones a moment later."""
    deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
    while not (found := list(records(file))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline_s, f"{file} has no end"
        time.sleep(0.1)
    return found


def items(update: Any) -> dict[str, str]:
    """Key -> JSON text of a history, summary or config update."""
    return {item.key or "/".join(item.nested_key): item.value_json for item in update}
