"""What the parser refuses, in one line: the file, the option, its value, what is wrong with it and what to do."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

import yaml

_MAX_CHARS = 400
_OURS = re.compile(r"^\s*(?:- )?((?:--)?\w+(?:\.\w+)+ = .*: .*\.)$", re.MULTILINE)  # a ConfigError's text
_MISSING = re.compile(r"the following arguments are required: (.*)")
_KEY = re.compile(r'Parser key "([^"]+)"')
_UNKNOWN = re.compile(r"(?:Option '([^']+)' is not accepted|(?:Group '([^']+)' )?does not accept option '([^']+)')")
_VALUE = re.compile(r"(?:Got value|Given value): (.*)|Unable to load config '?(.*?)'?$", re.MULTILINE)
_UNION = re.compile(r"^\s*Subtypes: \[(.*)\]$", re.MULTILINE)
_EXPECTED = re.compile(r"Expected an? (.*?)(?:\. Got value: .*)?$", re.MULTILINE)


class Usage:
    """The options that there are, and the files that were read; knows where a name was meant to lead."""

    def __init__(self, options: Mapping[str, Any], subcommands: Iterable[str] = ()) -> None:
        """Take them in.

        Args:
            options: name -> type.
            subcommands: stand before the names of their options in messages, and go.
        """
        self._options, self._subcommands = dict(options), tuple(subcommands)
        self.files: dict[str, str] = {}  # name -> content

    def explain(self, message: str, reading: str | None = None) -> str | None:
        """One line with a remedy where there is one; None for a message that is no refusal of an option.

        Args:
            message: jsonargparse's.
            reading: the file that is being read.
        """
        if ours := _OURS.search(message):
            return _in(reading, ours.group(1))
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
        problem = self._problem(message)
        if problem is None and key is not None:
            return _in(reading, f"{option}: {compact(message[key.end() :].strip(' :'))}")
        return _in(reading, f"{option} = {_shown(value)}: {problem}.{self._nearest_class(option, value)}")

    def _required(self, names: list[str]) -> str:
        where = " or in the file of --config" if "config" in self._options else ""
        each = "it" if len(names) == 1 else "them"
        return f"{', '.join(names)}: required and not given. Give {each} on the command line{where}."

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

    def _nearest(self, path: str) -> str:
        close = difflib.get_close_matches(path, self._options, 1)
        if not close:
            return ""
        return f" Did you mean {close[0]}?"

    def _nearest_class(self, option: str, value: str) -> str:
        names = {kind.__name__ for kind in _classes(self._options.get(option)) if not kind.__name__.startswith("_")}
        close = difflib.get_close_matches(value, names, 1)
        return f" Did you mean {close[0]}?" if close else ""

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
