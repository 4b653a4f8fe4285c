"""The part of vLLM's log that belongs into an error message."""

import re
from pathlib import Path

LOG_TAIL_LINES = 30
# An engine core or worker that fails logs its traceback line by line, behind its name, and only then does the process
# that waits for it give up ("See root cause above"), with a longer traceback of its own.
_CAUSE = re.compile(r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR .*\] ((?:\w+\.)*\w*(?:Error|Exception)\b.*)$")


def log_tail(log_file: Path, start_bytes: int = 0) -> str:
    """The last lines of a log, and the error that began it all where that stands above them; for the end of a message.

    Args:
        log_file: what vLLM printed.
        start_bytes: where this vLLM's part begins.
    """
    with log_file.open("rb") as file:
        file.seek(start_bytes)
        lines = file.read().decode(errors="replace").splitlines()
    above = lines[:-LOG_TAIL_LINES]
    cause = next((match[1].rstrip(".") for line in above if (match := _CAUSE.match(line))), None)
    first = "" if cause is None else f" The first error in {log_file}: {cause}."
    return f"{first} The last lines of {log_file}:\n" + "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])
