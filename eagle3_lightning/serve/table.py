"""A bench report for people."""

from pathlib import Path

from eagle3_lightning.serve.messages import Difference
from eagle3_lightning.serve.results import BenchReport, DraftFigures, Recommendation, Repeat, is_near_tie

MAX_SHOWN = 10
COLUMNS = ("prompts", "K", "requests", "acceptance length", "per position", "tokens/s", "alone", "ratio", "identical")


def as_text(report: BenchReport) -> str:
    """The table, the differences and the advice, as lines of text."""
    lines = [
        f"draft    {report.draft}",
        f"target   {report.target}",
        f"prompts  {report.num_prompts}, greedy, at most {report.max_new_tokens} new tokens each",
        f"engine   vLLM {report.vllm_version}, {report.dtype}, {report.device}",
        "",
        *_table([COLUMNS, *map(_row, report.figures)]),
    ]
    for figures in report.figures:
        lines += _differences(figures, report.dtype)
    lines += [""] + [_repeat(repeat) for repeat in report.repeats]
    lines += [f"lossless: {'yes' if report.lossless else 'NO'}{_meaning(report)}"]
    lines += [_advice(advice) for advice in report.recommended]
    return "\n".join(lines + [never_accepted(report, depth) for depth in report.never_accepted])


def never_accepted(report: BenchReport, depth: int) -> str:
    """What it means that nothing of a draft was accepted."""
    rounds = sum(figures.num_drafts for figures in report.figures if figures.num_speculative_tokens == depth)
    return (
        f"NOT ONE drafted token was accepted in {rounds} rounds with K = {depth}: this draft is served wrongly, unless "
        "it had a few steps of training at most; a badly trained one has some accepted. Look at: the version of vLLM "
        f"(here {report.vllm_version}) and what it takes of config.json (norm_before_residual, norm_before_fc, "
        "fc_norm, norm_output, sliding_window, eagle_aux_hidden_state_layer_ids); d2t in the weights; the target's "
        "tokenizer and chat template. See docs/troubleshooting.md."
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _row(figures: DraftFigures) -> tuple[str, ...]:
    low, high = figures.acceptance_length_ci95
    return (
        Path(figures.prompts).name,
        str(figures.num_speculative_tokens),
        str(figures.concurrency),
        f"{figures.acceptance_length:.3f} ({low:.2f} to {high:.2f})",
        " ".join(f"{share:.3f}" for share in figures.acceptance_per_position),
        f"{figures.tokens_per_s:.1f}",
        f"{figures.plain_tokens_per_s:.1f}",
        f"{figures.speedup:.2f}",
        f"{figures.identical}/{figures.num_prompts}",
    )


def _differences(figures: DraftFigures, dtype: str) -> list[str]:
    if not figures.differences:
        return []
    where = f"{Path(figures.prompts).name}, K = {figures.num_speculative_tokens}, {figures.concurrency} requests"
    lines = ["", f"first differences with {where}, widest gap first:"]
    lines += [_difference(difference, dtype) for difference in figures.differences[:MAX_SHOWN]]
    if (hidden := len(figures.differences) - MAX_SHOWN) > 0:
        lines.append(f"  and {hidden} more with narrower gaps (--json lists all)")
    return lines


def _difference(difference: Difference, dtype: str) -> str:
    return (
        f"  prompt {difference.prompt}, token {difference.position}: {difference.draft_token} with the draft, "
        f"{difference.plain_token} alone; the target's best are {difference.top_tokens[:3]}, and the lower of the two "
        f"lies {difference.gap:.4f} nats down: {'near-tie' if is_near_tie(difference, dtype) else 'REAL'}"
    )


def _repeat(repeat: Repeat) -> str:
    return (
        f"the target alone against itself, {Path(repeat.prompts).name} backwards, {repeat.concurrency} requests: "
        f"{repeat.identical} of {repeat.num_prompts} outputs identical, widest gap {repeat.widest_gap:.4f} nats"
    )


def _meaning(report: BenchReport) -> str:
    if any(figures.differences for figures in report.figures) and report.lossless:
        return (
            " (every difference is a near-tie of the target, which rounding decides; --dtype float32 shows it on a CPU)"
        )
    if not report.lossless and report.dtype == "float32" and report.device != "cpu":
        return " (float32 is exact on the CPU alone: on CUDA vLLM's attention computes in TF32, see docs/metrics.md)"
    return " (all outputs identical, token by token)" if report.lossless else ""


def _advice(advice: Recommendation) -> str:
    tokens = advice.num_speculative_tokens
    return (
        f"fastest at {advice.concurrency} concurrent requests: {f'K = {tokens}' if tokens else 'no draft'} "
        f"(best draft: {advice.speedup:.2f} x the target alone)"
    )
