"""A directory of samples: what a run made is there for its later epochs and for other runs, without vLLM.

DIR/cache.json                              whose states these are; another target or other layers are refused
DIR/{train,val}/hidden_states/hs_N.safetensors   row N of the prompts, see files.py
DIR/{train,val}/dropped.jsonl               rows that cannot be made, and why
DIR/{train,val}/*.arrow, ...                the data set that speculators expects beside them (`write_indexes`)
"""

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import CacheOptions
from eagle3_lightning.stream.files import FinalNorm, SampleFileError, StoredSample, write_sample
from eagle3_lightning.stream.messages import Dropped, DropReason, Stream
from eagle3_lightning.stream.sample import FinishedSample

OPTION = "data.cache.dir"
FORMAT = 1
_log = logging.getLogger(__name__)
_FILE = re.compile(r"hs_(\d+)\.safetensors")
# Reasons that lie in the sample; the others (an engine that died) may not come again. `too_long` holds under the same
# limits alone.
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
        self._check_facts(facts)
        self._rows: dict[Stream, set[int]] = {}
        self._indexed: dict[Stream, set[int]] = {}  # rows at the opening, or at the last `write_indexes`
        self._dropped: dict[Stream, dict[int, Dropped]] = {}
        self.num_bytes = 0
        for stream in ("train", "val"):
            self._scan(stream)

    def has(self, stream: Stream, row: int) -> bool:
        """Whether a row is there, or known to be unusable. Finds what other ranks have written, too."""
        if row in self._rows[stream] or row in self._dropped[stream]:
            return True
        if self._path(stream, row).exists():
            self._rows[stream].add(row)
            return True
        return False

    def has_all(self, stream: Stream, rows: Iterable[int]) -> bool:
        """Whether none of the rows has to be made."""
        return all(self.has(stream, row) for row in rows)

    @property
    def is_full(self) -> bool:
        """Whether the size cap keeps further samples out."""
        return self.num_bytes >= self._max_bytes

    def load(self, stream: Stream, row: int, index: int) -> StoredSample | Dropped:
        """A row as sample `index`; a file that has become unreadable is a dropped sample."""
        if (dropped := self._dropped[stream].get(row)) is not None:
            return Dropped(stream, index, dropped.name, dropped.reason, dropped.detail)
        try:
            return StoredSample(self._path(stream, row), stream, index, self._norm, self._dtype)
        except SampleFileError as error:
            return Dropped(stream, index, f"row {row}", "bad_record", str(error))

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
        with (self.directory / dropped.stream / "dropped.jsonl").open("a", encoding="utf-8") as file:
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
            self._rows[stream] = {row for row, _ in self._files(stream)}
            if self._rows[stream] - indexed:
                self._write_index(stream)
                self._indexed[stream] = set(self._rows[stream])

    def _write_index(self, stream: Stream) -> None:
        import datasets

        columns: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
        for row in range(max(self._rows[stream]) + 1):
            ids, mask = [0], [0]
            if row in self._rows[stream]:
                stored = StoredSample(self._path(stream, row), stream, row, self._norm, self._dtype)
                ids, mask = stored.token_ids, [0] * stored.num_rows
                for start, end in stored.spans:
                    mask[start:end] = [1] * (end - start)
            columns["input_ids"].append(ids)
            columns["loss_mask"].append(mask)
            columns["seq_len"].append(len(ids))
        table = datasets.Dataset.from_dict(columns).with_format("torch")
        datasets.disable_progress_bars()
        table.save_to_disk(str(self.directory / stream))

    def _path(self, stream: Stream, row: int) -> Path:
        return self.directory / stream / "hidden_states" / f"hs_{row}.safetensors"

    def _scan(self, stream: Stream) -> None:
        (self.directory / stream / "hidden_states").mkdir(parents=True, exist_ok=True)
        files = self._files(stream)
        self._rows[stream] = {row for row, _ in files}
        self._indexed[stream] = set(self._rows[stream])
        self.num_bytes += sum(entry.stat().st_size for _, entry in files)
        self._dropped[stream] = {}
        if (file := self.directory / stream / "dropped.jsonl").exists():
            for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                if line["reason"] == "too_long" and line.get("limits") != self._limits:
                    continue
                dropped = Dropped(stream, line["row"], line["name"], line["reason"], line["detail"])
                self._dropped[stream][line["row"]] = dropped

    def _files(self, stream: Stream) -> list[tuple[int, os.DirEntry[str]]]:
        """Rows that are on disk now, with their files."""
        entries = os.scandir(self.directory / stream / "hidden_states")
        return [(int(found[1]), entry) for entry in entries if (found := _FILE.fullmatch(entry.name))]

    def _check_facts(self, facts: StoreFacts) -> None:
        file = self.directory / "cache.json"
        ours = json.loads(json.dumps({"format": FORMAT, **asdict(facts)}))
        if file.exists():
            theirs = read_facts(self.directory)
            for key, value in ours.items():
                if theirs.get(key) != value:
                    raise ConfigError(
                        OPTION,
                        str(self.directory),
                        f"it holds the states of another {key} ({theirs.get(key)} there, {value} here)",
                        "Name another directory, or give the run that it was made with.",
                    )
            return
        if self.directory.exists() and any(self.directory.iterdir()):
            raise ConfigError(
                OPTION, str(self.directory), "it is not empty and holds no cache.json", "Name a new directory."
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f".cache.json.{os.getpid()}")
        partial.write_text(json.dumps(ours, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, file)


def read_facts(directory: Path) -> dict[str, Any]:
    """The cache.json of a store.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        facts: dict[str, Any] = json.loads((directory / "cache.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(
            OPTION, str(directory), f"its cache.json is not JSON ({error})", "Name another directory."
        ) from error
    return facts
