"""summary.json: the figures of a run that count, in one file. The fit writes its part, the bench adds its own."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_lightning.errors import ConfigError

if TYPE_CHECKING:
    from eagle3_lightning.serve.results import BenchReport

SUMMARY_FILE = "summary.json"


def update_summary(file: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Add values to a summary, over those of the same names; the file is replaced in one step.

    Args:
        file: the summary; made if it is not there.
        values: what JSON can hold.

    Returns:
        The whole summary.

    Raises:
        ConfigError: the file is there and is not a JSON object.
    """
    summary: Any = {}
    if file.is_file():
        try:
            summary = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError("--summary", str(file), f"it is not JSON ({error})", "Name another file.") from error
        if not isinstance(summary, dict):
            raise ConfigError("--summary", str(file), "it is not a JSON object", "Name another file.")
    summary |= values
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return dict(summary)


def served_figures(report: "BenchReport") -> dict[str, object]:
    """What of a bench goes into a run's summary.json: the first number of tokens at the first concurrency."""
    first = report.figures[0]
    return {
        "served_acceptance_length": first.acceptance_length,
        "served_acceptance_length_ci95": first.acceptance_length_ci95,
        "acceptance_per_position": first.acceptance_per_position,
        "num_speculative_tokens": first.num_speculative_tokens,
        "concurrency": first.concurrency,
        "lossless": report.lossless,
        "identical_outputs": first.identical,
        "num_prompts": report.num_prompts,
        "tokens_per_s": first.tokens_per_s,
        "plain_tokens_per_s": first.plain_tokens_per_s,
        "vllm_version": report.vllm_version,
        "export_dir": str(Path(report.draft).resolve()),
    }
