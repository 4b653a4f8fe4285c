"""The errors a user can meet. Every message says what was wrong, with which value, and what to do."""

import difflib
import signal
from collections.abc import Iterable

_SHOWN_CHARS = 200


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names the nearest of the words that there are; empty if none is near."""
    close = difflib.get_close_matches(word, sorted(known), 1)
    return f"Did you mean {close[0]}?" if close else ""


class Eagle3Error(Exception):
    """Base class. The command line prints its message without a traceback and exits with `exit_code`."""

    exit_code = 1


class ConfigError(Eagle3Error, ValueError):
    """An option, a file or a checkpoint that cannot be used; found before any work is spent where possible."""

    exit_code = 2

    def __init__(self, option: str, value: object, problem: str, remedy: str) -> None:
        """Build the message `option = value: problem. remedy`.

        Args:
            option: the option as the user writes it, for example `target.path`.
            value: the value that was refused; the message shows no more than its beginning.
            problem: what is wrong with it, a sentence without its full stop.
            remedy: what to do about it, a whole sentence.
        """
        self.option, self.value, self.problem, self.remedy = option, value, problem, remedy
        shown = repr(value)
        if len(shown) > _SHOWN_CHARS:
            shown = shown[: _SHOWN_CHARS - 1] + "…"
        super().__init__(f"{option} = {shown}: {problem}. {remedy}")


class OptionsError(Eagle3Error):
    """Options that Lightning or another library refuses, in that library's own words."""

    exit_code = 2


class ProducerError(Eagle3Error):
    """The process that owns vLLM failed, died or did not answer in time; carries its last log lines."""


class SampleError(Eagle3Error):
    """Too many samples had to be dropped, or none was left to train on."""


class CheckpointError(Eagle3Error):
    """A checkpoint could not be written; the one before it is whole."""


class TerminatedError(BaseException):
    """The run was asked to end by a signal; its exit status is 128 + the signal, as shells have it.

    Like KeyboardInterrupt it is no Exception: it may come at any line, and libraries swallow Exceptions in many.
    """

    def __init__(self, number: int, what: str = "") -> None:
        """Say which signal ended the run, and where.

        Args:
            number: of the signal.
            what: the rest of the sentence.
        """
        super().__init__(f"ended by {signal.Signals(number).name}{what}")
        self.exit_code = 128 + number
