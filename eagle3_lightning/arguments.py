"""One argument parser for all commands: flags are written out in full, `-` and `_` in their names are the same."""

import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser

USAGE_ERROR = 2


class StrictParser(ArgumentParser):
    """jsonargparse's parser without abbreviations: `--max` is an error instead of some longer flag's short form."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["allow_abbrev"] = False
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Parse, after `--max-new-tokens` has become `--max_new_tokens`."""
        keep_paths(self)
        return super().parse_args(None if args is None else [underscored(arg) for arg in args], *more, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say what is wrong, without the two hundred flags that are not."""
        if ex is not None and os.environ.get("JSONARGPARSE_DEBUG"):
            raise ex
        prog = self.prog.replace(" [options]", "")
        print(f"{prog}: {message}\n{prog} --help lists all options.", file=sys.stderr)
        raise SystemExit(USAGE_ERROR)


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
