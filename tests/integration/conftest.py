"""Prints what became of each fault as one table."""

import pytest
from fault_support import OUTCOMES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not OUTCOMES:
        return
    terminalreporter.section("faults and their outcomes")
    widths = [max(len(row[i]) for row in OUTCOMES) for i in range(3)]
    for row in [("fault", "when", "outcome"), tuple("-" * width for width in widths), *OUTCOMES]:
        terminalreporter.write_line(
            "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) + " |"
        )
