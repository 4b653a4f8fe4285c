"""Prints what became of each fault as one table, and leaves nothing running behind a test that failed."""

import signal
from collections.abc import Iterator

import pytest
from fault_support import OUTCOMES, end_running


def pytest_configure() -> None:
    # A shell that runs tests in the background has it ignore Ctrl-C, and so would the processes that tests send it to.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    yield
    end_running()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not OUTCOMES:
        return
    terminalreporter.section("faults and their outcomes")
    widths = [max(len(row[i]) for row in OUTCOMES) for i in range(3)]
    for row in [("fault", "when", "outcome"), tuple("-" * width for width in widths), *OUTCOMES]:
        terminalreporter.write_line(
            "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) + " |"
        )
