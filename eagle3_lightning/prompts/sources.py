"""Where prompts come from: opens what the options name, splits it, and counts what cannot be used."""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import yaml

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import SourceOptions
from eagle3_lightning.prompts.files import MAX_NAMED_FAULTS, Faults, JsonlSource, JsonSource, Keep
from eagle3_lightning.prompts.records import Record, name_faults
from eagle3_lightning.prompts.tables import StreamSource, TableSource
from eagle3_lightning.stream.foreign import holds_states

SELF = "self"
_TABLE_SUFFIXES = (".parquet", ".arrow")
# Of files: the name of a hub data set may have a dot in it, too (teknium/OpenHermes-2.5).
_FILE_SUFFIXES = (*_TABLE_SUFFIXES, ".jsonl", ".json", ".ndjson", ".txt", ".csv", ".gz", ".zst", ".pt")
_COMPRESSED = (b"\x1f", b"\x28")  # first bytes of gzip and zstd
_OF_STATES = ("layers", "layer_convention")  # options that a source of prompts has no use for
_log = logging.getLogger(__name__)


class Source(Protocol):
    """Rows with random access."""

    label: str
    faults: Faults

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def read(self, row: int) -> Record:
        """Row number `row`. Raises RecordError if it cannot be used."""
        ...

    def fingerprint(self) -> str:
        """Changes when the rows do."""
        ...


AnySource = Source | StreamSource


def as_sources(
    value: Sequence[str | Path | SourceOptions] | SourceOptions | str | Path, option: str
) -> list[SourceOptions]:
    """What the user wrote for `train` or `val`, as a list of sources.

    Raises:
        ConfigError: text that was meant to be a source but has an unknown key.
    """
    items = [value] if isinstance(value, str | Path | SourceOptions) else list(value)
    if any(not str(item.path if isinstance(item, SourceOptions) else item).strip() for item in items):
        raise ConfigError(option, "", "it is empty", "Name a file of prompts, or leave the source out.")
    sources = [item if isinstance(item, SourceOptions) else SourceOptions(str(item)) for item in items]
    for source in sources:
        if source.path.lstrip().startswith(("{", "[")):
            raise ConfigError(option, source.path, f"it is neither a path nor a source{_unknown_keys(source.path)}",
                              f"The keys are {', '.join(SourceOptions.__dataclass_fields__)}.")  # fmt: skip
    return sources


def _unknown_keys(text: str) -> str:
    """What of the text of an object keeps it from being a source."""
    try:
        given = yaml.safe_load(text)
    except yaml.YAMLError:
        return " (it is not YAML)"
    objects = [item for item in (given if isinstance(given, list) else [given]) if isinstance(item, dict)]
    if unknown := [str(key) for item in objects for key in item if key not in SourceOptions.__dataclass_fields__]:
        return f" (no such key: {', '.join(unknown)})"
    if any("path" not in item for item in objects):
        return " (`path` is missing)"
    shown = ", ".join(f"{key}: {value!r}" for item in objects for key, value in item.items() if key != "path")
    return f" (one of these is of the wrong type: {shown})" if shown else ""


def open_source(options: SourceOptions, option: str, keep: Keep | None = None, seed: int = 0) -> AnySource:
    """Open a source by what it is.

    Args:
        options: which.
        option: the option that named it, for messages.
        keep: which rows belong to this split; None is all.
        seed: of the shuffle, for streams.

    Raises:
        ConfigError: it is missing or empty, or cannot be opened.
    """
    path = Path(options.path).expanduser()
    if options.streaming:
        check_unused(options, option, _OF_STATES)
        return StreamSource(options, option, keep, seed)
    if path.is_file() and path.suffix not in _TABLE_SUFFIXES:
        first = next(_first_byte(path, option), b"")
        if not first:
            raise ConfigError(option, str(path), "the file is empty", "Give one JSON object per line, for example "
                              '{"messages": [{"role": "user", "content": "Hello"}]}.')  # fmt: skip
        if first in _COMPRESSED:
            raise ConfigError(option, str(path), "the file is compressed", "Unpack it: rows are read from any place.")
        check_unused(options, option, (*_OF_STATES, "subset", "split"))
        return (JsonSource if first == b"[" else JsonlSource)(path, option, keep, options.fields)
    if not path.exists() and (
        path.suffix in _FILE_SUFFIXES or options.path.startswith(("/", ".", "~")) or options.path.count("/") > 1
    ):
        raise ConfigError(option, options.path, "there is no such file", "Name a file of prompts, or a hub data set.")
    if holds_states(path):
        raise ConfigError(option, options.path, "it holds stored states and not prompts",
                          "Train on states alone, with states to validate on, or name prompts.")  # fmt: skip
    if path.is_dir() and not any(path.iterdir()):
        raise ConfigError(
            option, options.path, "the directory is empty", "Name a directory with JSONL or Parquet files."
        )
    check_unused(options, option, _OF_STATES)
    return TableSource(options, option, keep)


def check_unused(options: SourceOptions, option: str, unused: Sequence[str]) -> None:
    """Refuse options that a source of this kind would leave unread.

    Args:
        options: of the source.
        option: the option that named it, for messages.
        unused: names of fields.

    Raises:
        ConfigError: one of them is not at its default.
    """
    plain = SourceOptions(options.path)
    for name in unused:
        if (value := getattr(options, name)) != getattr(plain, name):
            raise ConfigError(f"{option}.{name}", value, f"{options.path} is read without it", "Leave it out.")


def _first_byte(path: Path, option: str) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(4096):
                if stripped := chunk.lstrip():
                    yield stripped[:1]
                    return
    except OSError as error:
        raise ConfigError(option, str(path), f"it cannot be read ({error.strerror})", "Check the path.") from error


def check_faults(
    sources: Sequence[AnySource],
    option: str,
    max_share: float,
    of_a_run: bool = True,
) -> None:
    """Warn of rows that cannot be used; refuse the data when they are too many or nothing is left.

    Args:
        sources: of one split.
        option: the option that named them, for messages.
        max_share: of the rows that may be unusable.
        of_a_run: whether the command has a run's options, which the advice may then name.

    Raises:
        ConfigError: no usable row, or more than `max_share` of the rows unusable.
    """
    sized = [source for source in sources if not isinstance(source, StreamSource)]
    if not sized:
        return
    rows = sum(len(source) for source in sized)
    faults = sum(source.faults.count for source in sized)
    named = name_faults([text for source in sized for text in source.faults.first][:MAX_NAMED_FAULTS])
    labels = ", ".join(source.label for source in sized)
    if rows == 0:
        remedy = "Add prompts, or change data.prompts.val_fraction." if of_a_run else "Add prompts."
        raise ConfigError(option, labels, "it holds no samples", remedy)
    if faults == rows or faults > max_share * rows:
        if not of_a_run:
            remedy = "Repair or remove them."
        elif faults == rows:
            remedy = "Repair them, or name other prompts."
        else:
            remedy = "Repair them, or raise data.queue.max_dropped_share to train without them."
        raise ConfigError(option, labels, f"{faults} of {rows} rows cannot be used: {named}", remedy)
    if faults:
        _log.warning("%d of %d rows of %s cannot be used and will be dropped: %s", faults, rows, labels, named)
