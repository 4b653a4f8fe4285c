"""What the parser refuses, in one line: the file, the option, its value, what is wrong with it and what to do."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml

from eagle3_lightning.errors import did_you_mean

_MAX_CHARS = 400
_OURS = re.compile(r"^\s*(?:- )?((?:--)?\w+(?:\.\w+)+ = .*: .*\.)$", re.MULTILINE)  # a ConfigError's text
_MISSING = re.compile(r"the following arguments are required: (.*)")
_KEY = re.compile(r'Parser key "([^"]+)"')
_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)")
_NOT_YAML = re.compile(r"Problems parsing config: (.*)", re.DOTALL)
_PLACE = re.compile(
    r'\s*in "<[^>]*>", (line \d+, column \d+|position \d+)(?::\n.*(?:\n *\^)?)?'
)  # with the line itself, and a mark
_EMPTY = "Not of type Path: it is empty"
_UNKNOWN = re.compile(r"(?:Option '([^']+)' is not accepted|(?:Group '([^']+)' )?does not accept option '([^']+)')")
_VALUE = re.compile(r"(?:Got value|Given value): (.*)|Unable to load config '?(.*?)'?$", re.MULTILINE)
_UNION = re.compile(r"^\s*Subtypes: \[(.*)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"Expected an? (.*?)(?:\. Got value: .*)?$", re.MULTILINE)


class Usage:
    """The options that there are, and the files that were read; knows where a name was meant to lead."""

    def __init__(
        self, options: Mapping[str, Any], subcommands: Iterable[str] = (), shown: Mapping[str, str] | None = None
    ) -> None:
        """Take them in.

        Args:
            options: name -> type.
            subcommands: stand before the names of their options in messages, and go.
            shown: name -> as the user knows it, where that is something else: `--run_dir`, or RUN for a place.
        """
        self._options, self._subcommands, self._shown = dict(options), tuple(subcommands), dict(shown or {})
        self.files: dict[str, str] = {}  # name -> content

    def explain(self, message: str, reading: str | None = None) -> str | None:
        """One line with a remedy where there is one; None for a message that is no refusal of an option.

        Args:
            message: jsonargparse's.
            reading: the file that is being read.
        """
        if ours := _OURS.search(message):
            return _in(reading, ours.group(1))
        if (unrecognized := _UNRECOGNIZED.search(message)) is not None:
            return self._unrecognized(unrecognized.group(1).split())
        if (fault := _NOT_YAML.search(message)) is not None:
            return _in(reading or "--config", _not_yaml(fault.group(1), self.files.get(reading or "", "")))
        key = _KEY.search(message)
        option = self._plain(key.group(1)) if key else ""
        if (unknown := _UNKNOWN.search(message)) is not None:
            name, group, member = unknown.groups()
            below = self._plain(name or ".".join(filter(None, (group, member))))
            path = f"{option}.{below}" if option and not below.startswith(option) else below
            return _in(reading or self._file_with(path), f"{path}: there is no such option.{self._nearest(path)}")
        if (missing := _MISSING.search(message)) is not None:
            names = [self._plain(name) for name in missing.group(1).split(", ")]
            return self._required([f"{option}.{name}" if option else name for name in names])
        if not option:
            return None
        if key is not None and (inner := _KEY.search(message, key.end())) is not None:  # of one key of an object
            return self.explain(
                message[inner.start() :].replace(inner.group(1), f"{option}.{inner.group(1)}", 1), reading
            )
        given = _VALUE.search(message)
        value = next((text for text in given.groups() if text is not None), "") if given else ""
        if value == "None" or "not NoneType" in message:
            return self._required([option])
        if _EMPTY in message or (value in ("", "''") and Path in _flat(self._options.get(option))):
            return _in(reading, f"{self._name(option)} = '': it is empty. Name a file or a directory.")
        problem = self._problem(message)
        if problem is None and key is not None:
            return _in(reading, f"{self._name(option)}: {compact(message[key.end() :].strip(' :'))}")
        return _in(reading, f"{self._name(option)} = {_shown(value)}: {problem}.{self._nearest_value(option, value)}")

    def _name(self, option: str) -> str:
        return self._shown.get(option, option)

    def _unrecognized(self, words: list[str]) -> str | None:
        """Of flags that there are not; None for a word that belongs to no flag."""
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        if not flags:
            return None
        return " ".join(f"{flag}: there is no such option.{self._nearest(flag[2:], '--')}" for flag in flags)

    def _required(self, names: list[str]) -> str:
        where = " or in the file of --config" if "config" in self._options else ""
        each = "it" if len(names) == 1 else "them"
        return f"{', '.join(map(self._name, names))}: required and not given. Give {each} on the command line{where}."

    def _plain(self, name: str) -> str:
        first, _, rest = name.partition(".")
        return rest if rest and first in self._subcommands else name

    def _problem(self, message: str) -> str | None:
        if "Unable to load config" in message:
            return "it is a group of options and takes no value. Write its options below it"
        if (union := _UNION.search(message)) is not None:
            return f"it must be one of: {_types(union.group(1))}"
        if (expected := _EXPECTED.search(message)) is not None:
            return f"it must be of type {_types(expected.group(1))}"
        return None

    def _nearest(self, path: str, dashes: str = "") -> str:
        close = difflib.get_close_matches(path, self._options, 1)
        return f" Did you mean {self._shown.get(close[0], f'{dashes}{close[0]}')}?" if close else ""

    def _nearest_value(self, option: str, value: str) -> str:
        """Of a class or of one of several words."""
        hint = self._options.get(option)
        names = {kind.__name__ for kind in _classes(hint) if not kind.__name__.startswith("_")}
        asked = did_you_mean(value, names | {kind for kind in _flat(hint) if isinstance(kind, str)})
        return f" {asked}" if asked else ""

    def _file_with(self, path: str) -> str | None:
        """The last file that has this option in it."""
        for file, content in reversed(self.files.items()):
            try:
                found = yaml.safe_load(content)
            except yaml.YAMLError:
                continue
            for name in path.split("."):
                found = found[name] if isinstance(found, dict) and name in found else None
            if found is not None:
                return file
        return None


def _not_yaml(fault: str, content: str) -> str:
    """Where a file stops being YAML, and why, from the parser's several lines."""
    places = _PLACE.findall(fault)
    why = compact(_PLACE.sub(",", fault)).strip(" ,").replace(" ,", ",")
    where = f"{places[-1]}: " if places else ""
    line = content.splitlines()[int(places[-1].split()[1].rstrip(",")) - 1 :][:1] if "line" in where else []
    tab = " Indent with spaces, not with tabs." if any("\t" in each for each in line) else ""
    return f"{where}it is not YAML ({why}).{tab}"


def compact(message: str) -> str:
    """Any other message, in one line."""
    line = " ".join(message.split())
    return line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"


def fields_of(option: str, hint: Any) -> dict[str, Any]:
    """The option, and below it the keys of the dataclasses that it may hold."""
    found = {option: hint}
    for kind in _flat(hint):
        if dataclasses.is_dataclass(kind):
            found |= {f"{option}.{field.name}": field.type for field in dataclasses.fields(kind)}
    return found


def _in(file: str | None, text: str) -> str:
    return f"{file}: {text}" if file else text


def _flat(hint: Any) -> list[Any]:
    arguments = get_args(hint)
    return [kind for argument in arguments for kind in _flat(argument)] if arguments else [hint]


def _classes(hint: Any) -> set[type]:
    found: set[type] = set()
    left = [kind for kind in _flat(hint) if isinstance(kind, type) and kind not in (object, type, bool, type(None))]
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left += type.__subclasses__(kind)
    return found


def _types(text: str) -> str:
    text = re.sub(r"<(?:class|enum) '([^']*)'>", r"\1", text).replace("NoneType", "null")
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(\w+)", r"\1", text)


def _shown(value: str) -> str:
    try:
        ast.literal_eval(value)
    except (ValueError, SyntaxError):
        value = repr(value)
    return compact(value)
