"""summary.json: the figures of a run that count, in one file. The fit writes its part, the bench adds its own."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import PROVENANCE_FILE

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
        ConfigError: see `read_summary`.
    """
    summary = (read_summary(file) if file.is_file() else {}) | values
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return summary


def read_summary(file: Path) -> dict[str, Any]:
    """What is in a summary.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("not an object")
    except OSError as error:
        raise ConfigError("--summary", str(file), f"it cannot be read ({error.strerror})", "Name a file.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "--summary", str(file), f"it is not a JSON object ({error})", "Name a new file, or a run's summary.json."
        ) from error
    return summary


def serves_other_prompts(summary: dict[str, Any]) -> bool:
    """Whether the served figures are of other prompts than the fit simulated; False where that is not known."""
    simulated, served = summary.get("simulated_on"), summary.get("served_acceptance_by_prompts")
    if not isinstance(simulated, list) or not isinstance(served, dict):
        return False
    return set(served) != set(simulated)


def served_figures(report: "BenchReport") -> dict[str, object]:
    """What of a bench goes into a run's summary.json: the first number of tokens at the first concurrency."""
    from eagle3_lightning.serve.results import pooled_acceptance

    first = report.figures[0]
    key = (first.num_speculative_tokens, first.concurrency)
    alike = [f for f in report.figures if (f.num_speculative_tokens, f.concurrency) == key]
    length, per_position = pooled_acceptance(alike)
    return {
        "served_acceptance_length": length,
        "served_acceptance_length_ci95": first.acceptance_length_ci95 if len(alike) == 1 else None,
        "served_acceptance_by_prompts": {str(Path(f.prompts).resolve()): f.acceptance_length for f in alike},
        "acceptance_per_position": per_position,
        "num_speculative_tokens": first.num_speculative_tokens,
        "concurrency": first.concurrency,
        "lossless": report.lossless,
        "identical_outputs": sum(f.identical for f in alike),
        "num_prompts": sum(f.num_prompts for f in alike),
        "tokens_per_s": sum(f.tokens_per_s * f.seconds for f in alike) / sum(f.seconds for f in alike),
        "plain_tokens_per_s": sum(f.plain_tokens_per_s * f.plain_seconds for f in alike)
        / sum(f.plain_seconds for f in alike),
        "vllm_version": report.vllm_version,
        "export_dir": str(Path(report.draft).resolve()),
        "served_step": _step_of(Path(report.draft)),
    }


def _step_of(export: Path) -> int | None:
    """The optimizer step at which a draft was exported; None where its directory does not say."""
    try:
        step = json.loads((export / PROVENANCE_FILE).read_text(encoding="utf-8"))["step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
