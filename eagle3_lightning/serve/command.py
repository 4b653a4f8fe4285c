"""`eagle3 bench`: arguments in, a table or JSON out."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import EngineOptions
from eagle3_lightning.serve.bench import BenchOptions, check_summary, measure
from eagle3_lightning.serve.messages import Progress
from eagle3_lightning.serve.table import as_text
from eagle3_lightning.summary import served_figures, serves_other_prompts, update_summary

NOT_LOSSLESS = 1
_LISTS = ("prompts", "num_speculative_tokens", "concurrency", "max_prompts")
_RUN_NAMES = re.compile(r"\bdata\.(?=engine\.)")  # the option of a fit that is --engine.… here


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 bench ...`; exit code 1 if an output differs more than rounding explains."""
    try:
        return _run(argv)
    except ConfigError as error:
        option, problem, remedy = (_RUN_NAMES.sub("--", text) for text in (error.option, error.problem, error.remedy))
        raise ConfigError(option, error.value, problem, remedy) from error


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    namespace = parser.parse_args(argv[1:])
    options, engine = namespace.as_dict(), namespace.engine.as_dict()
    as_json, summary, dtype = options.pop("json"), options.pop("summary"), options.pop("dtype")
    if options["target"] == "":
        raise ConfigError("--target", "", "it is empty", "Name the target, or leave the option out.")
    options["engine"] = EngineOptions(**engine, dtype=dtype)
    bench = BenchOptions(**options)
    if summary is not None:
        check_summary(summary)
    report = measure(bench, _Lines())
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(as_text(report))
    sys.stdout.flush()  # the figures are out before anything can go wrong with the file
    if summary is not None:
        whole = update_summary(summary, served_figures(report))
        if not as_json:
            print(against_simulation(whole))
    return 0 if report.lossless else NOT_LOSSLESS


def against_simulation(summary: dict[str, Any]) -> str:
    """The served acceptance length beside the one that the fit's last validation simulated, if there was one."""
    tau, served = summary.get("simulated_tau"), summary["served_acceptance_length"]
    if not isinstance(tau, float):
        return "simulated tau: none (the fit ended without a validation)"
    if serves_other_prompts(summary):
        return (
            f"simulated tau: {tau:.3f} on the run's held-out set; what was served are other prompts, which "
            "`eagle3 validate` simulates"
        )
    by = tau / served - 1
    where = f"{abs(by):.1%} {'over' if by > 0 else 'under'}" if f"{abs(by):.1%}" != "0.0%" else "equal to"
    return f"simulated tau: {tau:.3f} on the held-out set, {where} the served {served:.3f}"


def _parser() -> StrictParser:
    parser = StrictParser(
        prog="eagle3 bench",
        usage="eagle3 bench --draft DIR --prompts FILE ... [options]",
        description="Serves the target with the draft and alone, greedily, and compares.",
    )
    parser.add_class_arguments(BenchOptions, skip={"engine", *_LISTS})
    parser.add_argument(
        "--prompts",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="files of prompts in any format that training reads, each with figures of its own; a conversation's last "
        "answer is left out",
    )
    parser.add_argument(
        "--num_speculative_tokens",
        type=int,
        nargs="+",
        default=[],
        metavar="K",
        help="tokens proposed in a round, one engine start for each; the export's own number if not given",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[16],
        metavar="N",
        help="requests in flight, one pass over every file for each",
    )
    parser.add_argument(
        "--max_prompts",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="only the first so many prompts of each file: one number, or one for each concurrency",
    )
    parser.add_argument(
        "--dtype",
        choices=["auto", "bfloat16", "float16", "float32"],
        default="auto",
        help="of both models; in float32 the outputs must be identical: on a CPU they are, on CUDA vLLM's attention "
        "computes in TF32 even then, and near-ties may part",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of a table")
    parser.add_argument(
        "--summary",
        type=Path | None,
        default=None,
        metavar="FILE",
        help="put the main figures into this JSON file, beside what is in it already",
    )
    parser.add_class_arguments(EngineOptions, "engine", skip={"dtype", "max_model_len", "max_num_seqs"})
    parser.set_defaults({"engine.gpu_memory_utilization": 0.9})
    return parser


class _Lines:
    """Progress on stderr: one line for each stage of each engine."""

    def __init__(self) -> None:
        self._last = ("", "")

    def __call__(self, label: str, progress: Progress) -> None:
        if (label, progress.stage) != self._last:
            self._last = (label, progress.stage)
            print(f"[{label}] {progress.stage}", file=sys.stderr, flush=True)
