"""The `eagle3` command: finds the subcommand, runs it, and turns errors into messages and exit codes.

Nothing heavy is imported here: `eagle3 --help` answers at once, and each subcommand imports what it needs.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_lightning import __version__
from eagle3_lightning.errors import Eagle3Error, TerminatedError, did_you_mean

# name -> (module with `main(argv) -> exit code`, one line of help)
COMMANDS = {
    "fit": ("eagle3_lightning.trainer_cli", "train a draft: vLLM makes the hidden states while Lightning trains"),
    "plan": ("eagle3_lightning.plan.command", "say whether a fit will fit, and how long it will take"),
    "validate": ("eagle3_lightning.trainer_cli", "validate a checkpoint on the held-out prompts"),
    "export": ("eagle3_lightning.export.command", "write a checkpoint's draft as a directory that vLLM serves"),
    "bench": ("eagle3_lightning.serve.command", "measure a draft in vLLM: acceptance length, tokens/s, losslessness"),
    "prompts": ("eagle3_lightning.prompts.command", "look at prompts, or let the target write them"),
    "report": ("eagle3_lightning.report", "write one HTML page of a run: curves, simulated and served acceptance"),
    "doctor": ("eagle3_lightning.doctor", "show what is installed, what is missing and how to get it"),
}
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes them from the command line.

    Returns:
        The exit code: 0, 1 for failures while running, 2 for a mistake in options, files or checkpoints.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"eagle3_lightning {__version__}")
        return 0
    if arguments[0] not in COMMANDS:
        remedy = did_you_mean(arguments[0], COMMANDS) or f"It is one of {', '.join(COMMANDS)}."
        print(f"eagle3: there is no command {arguments[0]!r}. {remedy}", file=sys.stderr)
        return 2
    try:
        command: Any = importlib.import_module(COMMANDS[arguments[0]][0])
        return int(command.main(arguments))
    except (Eagle3Error, TerminatedError) as error:
        print(f"eagle3 {arguments[0]}: {error}", file=sys.stderr)
        return error.exit_code
    except UnicodeDecodeError as error:
        file = _binary_config(arguments)
        if file is None:  # not the user's --config: a mistake in this program
            raise
        print(f"eagle3 {arguments[0]}: --config = {file!r}: it is not UTF-8 text ({error.reason})", file=sys.stderr)
        return 2
    except OSError as error:  # its text has the file's name; anything else keeps its traceback
        print(f"eagle3 {arguments[0]}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"eagle3 {arguments[0]}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # how argument parsers end, after they have printed why
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _binary_config(arguments: Sequence[str]) -> str | None:
    """The first file named with --config that is not UTF-8 text."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name not in ("--config", "-c"):
            continue
        file = value if equals else following
        try:
            Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            return file
        except OSError:
            continue
    return None


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: eagle3 COMMAND [options]      (eagle3 COMMAND --help lists them)",
            "",
            "Trains EAGLE-3 drafts for vLLM on hidden states that vLLM makes online.",
            "",
            *lines,
        ]
    )
