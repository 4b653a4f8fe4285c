"""One argument parser for all commands: flags are written out in full, `-` and `_` in their names are the same."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import register_type

from eagle3_lightning.usage import Usage, compact, fields_of

USAGE_ERROR = 2


def _path(value: Any) -> Path:
    """A path that says something: the empty one, often a variable that was not set, would be the current directory."""
    if value == "":
        raise ValueError("it is empty")
    return Path(value)


register_type(Path, str, _path, type_check=isinstance)


class StrictParser(ArgumentParser):
    """jsonargparse's parser without abbreviations: `--max` is an error instead of some longer flag's short form."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)
        self._files: dict[str, str] = {}  # name -> content, of those that were read
        self._reading: str | None = None

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Parse, after `--max-new-tokens` has become `--max_new_tokens`."""
        keep_paths(self)
        return super().parse_args(None if args is None else [underscored(arg) for arg in args], *more, **kwargs)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Read a file, which messages then name."""
        self._reading = str(path)
        try:
            return super().parse_path(path, *args, **kwargs)
        finally:
            self._reading = None

    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Any:
        """Read a file's content; a group that has a value in it would lose its options without a word."""
        if self._reading is not None:
            self._files[self._reading] = content
        self._check_groups(content)
        return super().parse_string(content, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong in one line, without the two hundred flags that are not."""
        if not self.exit_on_error:  # the parser of a part, whose message becomes a part of the whole parser's
            super().error(message, ex)
        if ex is not None and os.environ.get("JSONARGPARSE_DEBUG"):
            raise ex
        prog, command = self.prog.replace(" [options]", ""), self._command()
        if command is not None:
            prog = f"{prog} {command}"
        text = self._usage().explain(message, self._reading) or compact(message)
        hint = "" if text.endswith("?") else f" `{prog} --help` lists all options."
        print(f"{prog}: {text if text.endswith(('.', '?')) else text + '.'}{hint}", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)

    def _command(self) -> str | None:
        """The subcommand that was asked for, where this parser has some."""
        given = getattr(self, "args", None) or []
        return given[0] if given and given[0] in self._subparsers_by_name() else None

    def _subparsers_by_name(self) -> dict[str, Any]:
        return {
            name: parser
            for action in self._actions
            if isinstance(action.choices, dict)
            for name, parser in action.choices.items()
        }

    def _usage(self) -> Usage:
        subparsers = self._subparsers_by_name()
        command = self._command()
        parsers = [self, *([subparsers[command]] if command else subparsers.values())]
        options: dict[str, Any] = {}
        shown: dict[str, str] = {}
        for parser in parsers:
            for action in parser._actions:
                options |= fields_of(action.dest, getattr(action, "_typehint", None))
                if not action.option_strings and isinstance(action.metavar, str):
                    shown[action.dest] = action.metavar
                elif f"--{action.dest}" in action.option_strings and "." not in action.dest:
                    shown[action.dest] = f"--{action.dest}"
        usage = Usage(options, subparsers, shown)
        for parser in parsers:
            usage.files |= getattr(parser, "_files", {})
        return usage

    def _check_groups(self, content: str) -> None:
        try:
            config = yaml.safe_load(content)
        except yaml.YAMLError:
            return  # the parser says what is wrong with it
        groups = {action.dest.rpartition(".")[0] for action in self._actions} - {""}
        groups |= {".".join(group.split(".")[:n]) for group in groups for n in range(1, group.count(".") + 1)}
        takes = {action.dest for action in self._actions if getattr(action, "_typehint", None) is not None}

        def check(values: Any, path: str) -> None:
            for name, value in values.items():
                option = f"{path}{name}"
                if option not in groups or option in takes:
                    continue
                if isinstance(value, dict):
                    check(value, f"{option}.")
                elif value is not None and not isinstance(value, str):  # text names a file of them
                    problem = "it is a group of options and takes no value"
                    members = sorted(action.dest for action in self._actions if action.dest.startswith(f"{option}."))
                    where = f"{self._reading}: " if self._reading else ""
                    self.error(f"{where}{option} = {value!r}: {problem}. Write its options below it, as {members[0]}.")

        if isinstance(config, dict):
            check(config, "")


def keep_paths(parser: Any) -> None:
    """Have a path stay a path where an option takes one or a list: jsonargparse would read the file as the list."""
    for action in parser._actions:
        alternatives = get_args(getattr(action, "_typehint", None))
        if str in alternatives and any(get_origin(alternative) is list for alternative in alternatives):
            action._enable_path = False
        if isinstance(action.choices, dict):  # the parsers of subcommands
            for subparser in action.choices.values():
                keep_paths(subparser)


def underscored(argument: str) -> str:
    """A flag with `_` for `-` in its name; its value and anything that is not a flag stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
