"""A directory of samples: what a run made is there for its later epochs and for other runs, without vLLM.

DIR/cache.json                              whose states these are; another target or other layers are refused
DIR/{train,val}/hidden_states/hs_N.safetensors   row N of the prompts, see files.py
DIR/{train,val}/dropped.jsonl               rows that cannot be made, and why
DIR/{train,val}/*.arrow, ...                the data set that speculators expects beside them (`write_indexes`)
"""

import errno
import json
import logging
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import torch

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.fingerprint import EARLIER_FORM, is_earlier_form
from eagle3_lightning.options import CacheOptions
from eagle3_lightning.stream.files import FinalNorm, SampleFileError, StoredSample, write_sample
from eagle3_lightning.stream.messages import Dropped, DropReason, Stream
from eagle3_lightning.stream.sample import FinishedSample

OPTION = "data.cache.dir"
FORMAT = 1
FACTS_FILE, DROPPED_FILE = "cache.json", "dropped.jsonl"
_PARTIAL = f".{FACTS_FILE}."  # and a process: facts that are being written
_log = logging.getLogger(__name__)
_FILE = re.compile(r"hs_(\d+)\.safetensors")
# Reasons that lie in the sample; the others (an engine that died) may not come again. `too_long` is kept with the
# limits that it was judged by, and says nothing to a run with others.
_LASTING: tuple[DropReason, ...] = ("bad_record", "too_long", "empty_mask", "non_finite")


@dataclass(frozen=True)
class StoreFacts:
    """What the states of a store depend on.

    Attributes:
        target: fingerprint of the target.
        aux_layers: auxiliary layers, our numbers (0-based, output of the layer).
        last_layer: the last layer.
        hidden_size: H.
        dtype: of the states, or `fp8`.
        tokenizer: fingerprint.
        template: fingerprint of chat template and arguments.
        prompts: fingerprint of the rows.
        sampling: fingerprint of mode and sampling.
    """

    target: str
    aux_layers: tuple[int, ...]
    last_layer: int
    hidden_size: int
    dtype: str
    tokenizer: str
    template: str
    prompts: str
    sampling: str


class SampleStore:
    """Opens a directory, or makes it. Ranks share it: a file is there or not, never half."""

    def __init__(
        self,
        options: CacheOptions,
        facts: StoreFacts,
        norm: FinalNorm,
        dtype: torch.dtype,
        limits: tuple[int, ...] = (),
        num_writers: int = 1,
    ) -> None:
        """Read what is there.

        Args:
            options: where and how much.
            facts: of this run.
            norm: the target's last.
            dtype: of the rows that are read.
            limits: lengths of this run; a row that was too long under others may be made now.
            num_writers: ranks that write to it, about as much each.

        Raises:
            ConfigError: the directory holds the states of something else, or is not a store.
        """
        assert options.dir is not None
        self.directory = options.dir
        self._norm, self._dtype, self._fp8 = norm, dtype, options.dtype == "fp8"
        self._max_bytes = int(options.max_gib * 2**30)
        self._limits, self._num_writers = list(limits), num_writers
        self._shape = (len(facts.aux_layers) + 1, facts.hidden_size)
        check_place(options.dir, facts)
        self._rows: dict[Stream, set[int]] = {}  # whose files have been looked into
        self._indexed: dict[Stream, set[int]] = {}  # rows at the opening, or at the last `write_indexes`
        self._dropped: dict[Stream, dict[int, Dropped]] = {}
        self.num_bytes = 0
        try:
            self._write_facts(facts)
            for stream in ("train", "val"):
                self._scan(stream)
        except OSError as error:
            raise _cannot_be_used(options.dir, error) from error

    def has(self, stream: Stream, row: int) -> bool:
        """Whether a row is there, or known to be unusable. Finds what other ranks have written, too.

        A file that cannot be read is removed, so that its row is made again.
        """
        if row in self._rows[stream] or row in self._dropped[stream]:
            return True
        if not self._path(stream, row).exists():
            return False
        try:
            self._read(stream, row, row)
        except SampleFileError as error:
            self._remove(stream, row, error)
            return row in self._dropped[stream]
        self._rows[stream].add(row)
        return True

    def has_all(self, stream: Stream, rows: Iterable[int]) -> bool:
        """Whether none of the rows has to be made."""
        return all(self.has(stream, row) for row in rows)

    @property
    def is_full(self) -> bool:
        """Whether the size cap keeps further samples out."""
        return self.num_bytes >= self._max_bytes

    def load(self, stream: Stream, row: int, index: int) -> StoredSample | Dropped:
        """A row as sample `index`; a file that has become unreadable is a dropped sample, and made by the next run."""
        if (dropped := self._dropped[stream].get(row)) is not None:
            return Dropped(stream, index, dropped.name, dropped.reason, dropped.detail)
        try:
            return self._read(stream, row, index)
        except SampleFileError as error:
            self._remove(stream, row, error)
            dropped = Dropped(stream, index, f"row {row}", "bad_record", str(error))
            self._dropped[stream][row] = dropped  # in this run, which may have no vLLM any more
            return dropped

    def write(self, row: int, sample: FinishedSample) -> None:
        """Keep a sample, if there is room."""
        if self.is_full or self.has(sample.stream, row):
            return
        size_bytes = write_sample(self._path(sample.stream, row), sample, self._norm, self._fp8)
        self.num_bytes += size_bytes * self._num_writers  # the others' samples are not seen from here
        self._rows[sample.stream].add(row)
        if self.num_bytes >= self._max_bytes:
            _log.warning("%s has reached data.cache.max_gib: it keeps no further samples", self.directory)

    def drop(self, row: int, dropped: Dropped) -> None:
        """Remember that a row cannot be made, if the reason is one that lasts."""
        if dropped.reason not in _LASTING or row in self._dropped[dropped.stream]:
            return
        self._dropped[dropped.stream][row] = dropped
        line = {
            "row": row,
            "name": dropped.name,
            "reason": dropped.reason,
            "detail": dropped.detail,
            "limits": self._limits,
        }
        with (self.directory / dropped.stream / DROPPED_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_indexes(self) -> None:
        """Write the data sets that speculators reads the files with, where rows came; row i belongs to hs_i.

        The rows of all ranks that are on disk by now are in it.
        Rows that are not there get one token and no supervision, so that the numbers agree.
        """
        if find_spec("datasets") is None:
            _log.info("%s has no index for speculators: the package `datasets` is not installed", self.directory)
            return
        for stream, indexed in self._indexed.items():
            rows = {row for row, _ in _files(self.directory, stream)}
            if rows - indexed:
                self._write_index(stream, rows)
                self._indexed[stream] = rows

    def _write_index(self, stream: Stream, rows: set[int]) -> None:
        """Write one; a file that cannot be read is removed and left out."""
        import datasets

        columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
        for row in range(max(rows) + 1):
            ids, mask = [0], [0]
            try:
                if row in rows:
                    stored = self._read(stream, row, row)
                    ids, mask = stored.token_ids, [0] * stored.num_rows
                    for start, end in stored.spans:
                        mask[start:end] = [1] * (end - start)
            except SampleFileError as error:
                self._remove(stream, row, error)
            columns["input_ids"].append(ids)
            columns["loss_mask"].append(mask)
            columns["seq_len"].append(len(ids))
        table = datasets.Dataset.from_dict(columns).with_format("torch")
        datasets.disable_progress_bars()
        table.save_to_disk(str(self.directory / stream))

    def _path(self, stream: Stream, row: int) -> Path:
        return self.directory / stream / "hidden_states" / f"hs_{row}.safetensors"

    def _read(self, stream: Stream, row: int, index: int) -> StoredSample:
        """A row as sample `index`.

        Raises:
            SampleFileError: its file is missing, cut short, or not of these layers.
        """
        sample = StoredSample(self._path(stream, row), stream, index, self._norm, self._dtype)
        if (found := (sample.num_layers, sample.hidden_size)) != self._shape:
            layers, width = self._shape
            raise SampleFileError(f"{sample.path}: {found[0]} layers of {found[1]}, not {layers} of {width}")
        return sample

    def _remove(self, stream: Stream, row: int, error: SampleFileError) -> None:
        """Say that a file cannot be read and remove it; a row whose file stays in the way is dropped."""
        path = self._path(stream, row)
        self._rows[stream].discard(row)
        try:
            size_bytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:  # another rank was first, and has said so
            return
        except OSError as fault:
            _log.warning("%s, and it cannot be removed (%s): its row is dropped", error, fault.strerror)
            self._dropped[stream][row] = Dropped(stream, row, f"row {row}", "bad_record", str(error))
            return
        self.num_bytes -= size_bytes
        _log.warning("%s: it cannot be read as a sample and is removed; its row is made again when vLLM runs", error)

    def _scan(self, stream: Stream) -> None:
        (self.directory / stream / "hidden_states").mkdir(parents=True, exist_ok=True)
        files = _files(self.directory, stream)
        self._rows[stream], self._dropped[stream] = set(), {}
        self._indexed[stream] = {row for row, _ in files}
        self.num_bytes += sum(entry.stat().st_size for _, entry in files)
        for line in _read_dropped(self.directory / stream / DROPPED_FILE, self._limits):
            dropped = Dropped(stream, line["row"], line["name"], line["reason"], line["detail"])
            self._dropped[stream][line["row"]] = dropped

    def _write_facts(self, facts: StoreFacts) -> None:
        file = self.directory / FACTS_FILE
        if file.exists():
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{_PARTIAL}{os.getpid()}")
        partial.write_text(json.dumps({"format": FORMAT, **asdict(facts)}, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, file)


def check_place(directory: Path, facts: StoreFacts, unknown: Sequence[str] = ()) -> None:
    """Refuse a directory that cannot be the store of a run; nothing is written.

    Args:
        directory: of the store, there or not.
        facts: of the run.
        unknown: facts that are not known yet.

    Raises:
        ConfigError: it is not a directory, not a store, or holds the states of something else.
    """
    try:
        place = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
        if not place.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{place} is no directory")
        if place != directory and not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{place} cannot be written to")
        # Another rank may be making it. It writes the facts before anything else, so they are looked for last.
        there = directory.iterdir() if place == directory else ()
        is_used = any(not path.name.startswith(_PARTIAL) for path in there)
        has_facts = (directory / FACTS_FILE).exists()
    except OSError as error:
        raise _cannot_be_used(directory, error) from error
    if is_used and not has_facts:
        raise ConfigError(OPTION, str(directory), f"it is not empty and holds no {FACTS_FILE}", "Name a new directory.")
    if not has_facts:
        return
    theirs, ours = read_facts(directory), json.loads(json.dumps({"format": FORMAT, **asdict(facts)}))
    for key, value in ours.items():
        if key not in unknown and theirs.get(key) != value:
            problem = f"it holds the states of another {key} ({theirs.get(key)} there, {value} here)"
            if key == "target" and is_earlier_form(theirs.get(key)):
                problem = f"its fingerprint of the target is {EARLIER_FORM}"
            remedy = "Name another directory, or give the run that it was made with."
            raise ConfigError(OPTION, str(directory), problem, remedy)


def listed_rows(directory: Path, stream: Stream, limits: Sequence[int]) -> set[int]:
    """Rows of a store that have a file, or are known to be unusable; by names alone, and nothing is mended.

    Args:
        directory: of the store.
        stream: train or val.
        limits: see `SampleStore`.

    Raises:
        ConfigError: the list of unusable rows is damaged, or something cannot be read.
    """
    try:
        unusable = _read_dropped(directory / stream / DROPPED_FILE, limits, mend=False)
        return {row for row, _ in _files(directory, stream)} | {line["row"] for line in unusable}
    except OSError as error:
        raise _cannot_be_used(directory, error) from error


def read_facts(directory: Path, option: str = OPTION) -> dict[str, Any]:
    """The cache.json of a store.

    Args:
        directory: of the store.
        option: that named it, for messages.

    Raises:
        ConfigError: it is not a JSON object, or cannot be read.
    """
    problem = "is not a JSON object"
    try:
        facts = json.loads((directory / FACTS_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        facts, problem = None, f"is not JSON ({error})"
    except OSError as error:
        facts, problem = None, f"cannot be read ({error.strerror})"
    if not isinstance(facts, dict):
        raise ConfigError(option, str(directory), f"its {FACTS_FILE} {problem}", "Name another directory.")
    return facts


def _cannot_be_used(directory: Path, error: OSError) -> ConfigError:
    problem = f"it cannot be used as a directory of samples ({error.strerror or error})"
    return ConfigError(OPTION, str(directory), problem, "Name another directory.")


def _files(directory: Path, stream: Stream) -> list[tuple[int, os.DirEntry[str]]]:
    """Rows of a store that are on disk now, with their files."""
    place = directory / stream / "hidden_states"
    entries = os.scandir(place) if place.is_dir() else ()
    return [(int(found[1]), entry) for entry in entries if (found := _FILE.fullmatch(entry.name))]


def _read_dropped(file: Path, limits: Sequence[int], mend: bool = True) -> list[dict[str, Any]]:
    """The lines of a dropped.jsonl that hold under these limits.

    Args:
        file: there or not.
        limits: see `SampleStore`.
        mend: take off half a line at the end, of a run that was killed.

    Raises:
        ConfigError: another line is damaged.
    """
    if not file.exists():
        return []
    *whole, rest = file.read_bytes().split(b"\n")
    entries = []
    for number, text in enumerate(whole, 1):
        if (entry := _dropped_entry(text)) is None:
            raise ConfigError(
                OPTION,
                str(file),
                f"its line {number} is damaged ({text[:40].decode(errors='replace')!r})",
                "Remove that line: its row is tried again.",
            )
        if entry["reason"] != "too_long" or entry.get("limits") == list(limits):
            entries.append(entry)
    if rest and mend:
        _log.warning("%s ends with half a line, of a run that was killed: it is removed, its row is tried again", file)
        partial = file.with_name(f".{file.name}.{os.getpid()}")
        with suppress(OSError):  # of a store that can only be read
            partial.write_bytes(b"".join(text + b"\n" for text in whole))
            os.replace(partial, file)
    return entries


def _dropped_entry(text: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    kinds = {"row": int, "name": str, "reason": str, "detail": str}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in kinds.items()):
        return None
    return entry if entry["reason"] in get_args(DropReason) else None
