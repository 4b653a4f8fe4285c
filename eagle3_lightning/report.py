"""`eagle3 report RUN`: one self-contained HTML page of a run, from what lies in its directory."""

import csv
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from eagle3_lightning.arguments import StrictParser
from eagle3_lightning.charts import COLORS, Chart, Line, line_chart
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.read import read_export, serve_command
from eagle3_lightning.summary import serves_other_prompts

SERVED = "serve/acceptance_length"
SERVED_OTHERS = "serve/acceptance_length_of_other_prompts"  # only here: a bench of prompts that were not simulated
Curves = dict[str, list[tuple[float, float]]]

# (title, [(metric, label)]); a name that ends in * stands for every metric that begins so.
CHARTS: list[tuple[str, list[tuple[str, str]]]] = [
    ("Acceptance length: simulated and served", [("train/tau", "train, simulated"), ("val/tau", "held out, simulated"),
                                                 (SERVED, "served by vLLM"),
                                                 (SERVED_OTHERS, "served by vLLM, other prompts")]),
    ("Loss (KL to the target, nats per supervised token)", [("train/loss", "train"), ("val/loss", "held out")]),
    ("Held out: accuracy at step k, given all before it", [("val/cond_acc_*", "step ")]),
    ("Held out: loss at step k", [("val/loss_*", "step ")]),
    ("Speed (tokens/s)", [("perf/tokens_per_s", "trained"), ("producer/prefill_tokens_per_s", "prefilled by vLLM"),
                          ("producer/decode_tokens_per_s", "answered by vLLM")]),
    ("Who waits for whom (share of the time)", [("perf/wait_share", "trainer waits"),
                                                ("producer/starved_share", "vLLM waits for room"),
                                                ("producer/busy_share", "vLLM computes")]),
    ("Model FLOPs use (share of the device's matrix rate)", [("perf/mfu", "trainer")]),
    ("Queue (samples)", [("queue/depth_samples", "ready"), ("queue/dropped", "dropped so far")]),
    ("Text and vocabulary", [("train/greedy_agreement", "token is the target's best"),
                             ("train/teacher_oov", "target's best outside the draft vocabulary")]),
    ("Learning rate", [("train/lr", "learning rate")]),
    ("Gradient norm before clipping", [("train/grad_norm", "norm")]),
]  # fmt: skip
FIGURES = {
    "simulated_tau": "simulated acceptance length",
    "served_acceptance_length": "served acceptance length",
    "acceptance_per_position": "accepted per position",
    "lossless": "lossless",
    "tokens_per_s": "tokens/s with the draft",
    "plain_tokens_per_s": "tokens/s alone",
    "tokens_trained": "tokens trained on",
    "steps": "optimizer steps",
    "seconds": "seconds of the fit",
    "vllm_version": "vLLM",
}
# At which step it was measured, which a resumed run may have left behind.
MEASURED_AT = {
    "simulated_tau": "simulated_step",
    **dict.fromkeys(("served_acceptance_length", "acceptance_per_position", "lossless"), "served_step"),
    **dict.fromkeys(("tokens_per_s", "plain_tokens_per_s"), "served_step"),
}
STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#657084;--line:#dfe4ec;--paper:#fff;--card:#f7f9fc}
@media(prefers-color-scheme:dark){
:root{--ink:#e6eaf1;--soft:#9aa5b8;--line:#333c4a;--paper:#12161d;--card:#1a2029}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
body{max-width:1200px;margin:0 auto;padding:24px}
h1{font-size:24px;margin:0 0 4px}h2{font-size:17px;margin:28px 0 10px}p,.soft{color:var(--soft);margin:0}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(200px,45%),1fr));gap:10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:19px;overflow-wrap:anywhere}.card span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(460px,100%),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px}
figcaption{font-weight:600;margin-bottom:6px}svg{width:100%;height:auto;overflow:visible}
.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:11px}.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px;color:var(--soft)}
.key{display:inline-block;width:14px;height:3px;vertical-align:middle;margin-right:6px}
.table{overflow:auto}table{border-collapse:collapse;font-size:14px}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500}
iframe{width:100%;height:420px;border:1px solid var(--line);border-radius:8px;background:#fff}
pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px;overflow:auto;font-size:13px}
pre{white-space:pre-wrap;overflow-wrap:anywhere}.dot{stroke:var(--card);stroke-width:1.5}
@media(max-width:620px){body{padding:12px}.tick{font-size:17px}}
"""


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 report RUN`."""
    parser = StrictParser(prog="eagle3 report", description="Writes one self-contained HTML page of a run.")
    # As text: an empty Path is the current directory, and an empty argument a variable that was not set.
    parser.add_argument("run_dir", type=str, metavar="RUN", help="directory of a run of `eagle3 fit`")
    parser.add_argument("--out", type=str | None, default=None, metavar="FILE", help="default: RUN/report.html")
    parser.add_argument(
        "--png", type=str | None, default=None, metavar="DIR", help="also write each chart there as a PNG (matplotlib)"
    )
    arguments = parser.parse_args(argv[1:])
    places = {"RUN": arguments.run_dir, "--out": arguments.out, "--png": arguments.png}
    run_dir, out, png = (_place(option, text) for option, text in places.items())
    assert run_dir is not None
    out = out or run_dir / "report.html"
    page = make_page(run_dir)
    if png is not None:
        from eagle3_lightning.pictures import write_pngs

        files = write_pngs(make_charts(read_run(run_dir)[0]), png)
        print(f"wrote {len(files)} charts into {png}")
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError("--out", str(out), f"it cannot be written ({error.strerror})",
                          "Name a file in a directory that can be written.") from error  # fmt: skip
    print(f"wrote {out}")
    return 0


def _place(option: str, text: str | None) -> Path | None:
    if text is not None and not text.strip():
        raise ConfigError(option, text, "it is empty", "Name a place, `.` for the current directory.")
    return None if text is None else Path(text)


def make_page(run_dir: Path) -> str:
    """The page of a run.

    Args:
        run_dir: its directory.

    Raises:
        ConfigError: not a directory, or nothing in it to report.
    """
    curves, summary = read_run(run_dir)
    colors = "".join(
        f".c{n}{{stroke:{c}}}.key.c{n}{{background:{c}}}.dot.c{n}{{fill:{c}}}" for n, c in enumerate(COLORS)
    )
    charts = "".join(map(line_chart, make_charts(curves)))
    return "\n".join([
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(run_dir.resolve().name)}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}{colors}</style>',
        f"<h1>{escape(run_dir.resolve().name)}</h1><p>{escape(str(run_dir.resolve()))}</p>",
        f'<h2>Result</h2><div class="cards">{_cards(summary)}</div>',
        *_serve(run_dir, summary),
        *_agreement(curves),
        f'<h2>Curves</h2><div class="charts">{charts}</div>',
        *_drops(summary),
        *_files(run_dir),
    ])  # fmt: skip


def read_run(run_dir: Path) -> tuple[Curves, dict[str, Any]]:
    """Curves and summary of a run.

    Raises:
        ConfigError: not a directory, or nothing in it to report.
    """
    curves, summary = read_curves(run_dir), read_summary(run_dir)
    if SERVED not in curves and None not in (summary.get("served_acceptance_length"), summary.get("steps")):
        step = summary["steps"] if summary.get("served_step") is None else summary["served_step"]
        name = SERVED_OTHERS if serves_other_prompts(summary) else SERVED
        curves[name] = [(float(step), float(summary["served_acceptance_length"]))]  # of `eagle3 bench`
    if not curves and not summary:
        raise ConfigError("RUN", str(run_dir), "it holds neither logs/*/metrics.csv nor summary.json",
                          "Name the run_dir of an `eagle3 fit` that logs with the CSVLogger.")  # fmt: skip
    return curves, summary


def make_charts(curves: Curves) -> list[Chart]:
    """Those that have something to draw."""
    charts = [Chart(title, [line for line in _lines(curves, wanted) if line.points]) for title, wanted in CHARTS]
    return [chart for chart in charts if chart.lines]


def read_curves(run_dir: Path) -> Curves:
    """Every metric of all starts of a run as points (step, value), ascending; a resumed step takes the later value."""
    found: dict[str, dict[float, float]] = {}
    files = sorted(run_dir.glob("*/*/metrics.csv"), key=lambda file: file.stat().st_mtime)
    for file in files:
        try:
            _add_rows(file, found)
        except (OSError, KeyError, ValueError, TypeError, csv.Error) as error:
            problem = f"it is not a table of metrics by step ({type(error).__name__}: {error})"
            raise ConfigError("RUN", str(file), problem,
                              "Remove it, or repair it.") from error  # fmt: skip
    return {name: sorted(points.items()) for name, points in found.items()}


def _add_rows(file: Path, found: dict[str, dict[float, float]]) -> None:
    with file.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if not math.isfinite(step := float(row.pop("step"))):
                raise ValueError(f"step {step}")
            for name, text in row.items():
                if text and math.isfinite(value := float(text)):
                    found.setdefault(name, {})[step] = value


def read_summary(run_dir: Path) -> dict[str, Any]:
    """summary.json, or nothing.

    Raises:
        ConfigError: it is there and is not a JSON object with figures.
    """
    file = run_dir / "summary.json"
    if not file.exists():
        return {}
    try:
        summary = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(summary, dict):
            raise ValueError("not an object")
        for key in ("steps", "served_acceptance_length", "served_step", "simulated_step"):
            if not math.isfinite(float(summary.get(key) or 0)):
                raise ValueError(f"{key} is not finite")
        if not isinstance(summary.get("export_dir", ""), str):
            raise ValueError("export_dir is not a path")
        _cards(summary), _drops(summary)  # they show what the summary says, if it can be shown
    except (OSError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigError("RUN", str(file), f"it is not a summary of a run ({type(error).__name__}: {error})",
                          "Remove it, or repair it.") from error  # fmt: skip
    return summary


def _lines(curves: Curves, wanted: list[tuple[str, str]]) -> list[Line]:
    lines = []
    for name, label in wanted:
        if name.endswith("*"):
            found = sorted(n for n in curves if n.startswith(name[:-1]))
            lines += [Line(label + n.removeprefix(name[:-1]), curves[n]) for n in found]
        else:
            lines.append(Line(label, curves.get(name, []), dots=name.startswith("serve/")))
    return lines


def _cards(summary: dict[str, Any]) -> str:
    shown = [(_label(key, summary), _value(summary[key])) for key in FIGURES if summary.get(key) is not None]
    return "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in shown
    )


def _label(key: str, summary: dict[str, Any]) -> str:
    step = summary.get(MEASURED_AT.get(key, ""))
    return FIGURES[key] if step in (None, summary.get("steps")) else f"{FIGURES[key]}, at step {step:,.0f}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, list):
        return " / ".join(f"{entry:.3f}" for entry in value)
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _serve(run_dir: Path, summary: dict[str, Any]) -> list[str]:
    """The commands that serve the drafts: the best that was measured, and what the training ended with."""
    last = Path(summary.get("export_dir") or run_dir / "export")
    if not last.is_dir():  # the run was moved
        last = run_dir / "export"
    parts = []
    for title, export in (("the best measured in vLLM", run_dir / "best"), ("what the training ended with", last)):
        try:
            draft = read_export(export, "export_dir")
        except ConfigError:  # it is not there, or not any more
            continue
        command = serve_command(export.resolve(), draft.target_name, draft.num_speculative_tokens)
        parts.append(f"<p>{title}</p><pre>{escape(command)}</pre>")
    return ["<h2>Serve it</h2>", *parts] if parts else []


def _agreement(curves: Curves) -> list[str]:
    """Each served measurement beside the simulated value of the validation at its step, or the last before it."""
    rows = []
    for step, served in curves.get(SERVED, []):
        before = [(s, tau) for s, tau in curves.get("val/tau", []) if s <= step + 1]
        if before:
            at, tau = before[-1]
            over = f"{tau / served - 1:+.1%}" if served >= 1 else "-"  # below 1: nothing was measured
            rows.append((f"{step:,.0f}", f"{served:.3f}", f"{tau:.3f} (step {at:,.0f})", over))
    if not rows:
        return []
    head = ("step", "served by vLLM", "simulated on the held-out set", "simulated over served")
    return ["<h2>Simulated against served</h2>", _table(head, rows)]


def _drops(summary: dict[str, Any]) -> list[str]:
    """How many samples were dropped, why, and the first of each."""
    dropped, first = summary.get("samples_dropped"), summary.get("first_dropped") or {}
    if not isinstance(dropped, dict) or not isinstance(first, dict):
        return []
    if not dropped:
        return ["<h2>Dropped samples</h2><p>none</p>"]
    rows = [(str(reason), f"{count:,}", _examples(first.get(reason))) for reason, count in dropped.items()]
    return ["<h2>Dropped samples</h2>", _table(("reason", "samples", "the first ones"), rows)]


def _examples(names: Any) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else str(names or "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    return f'<div class="table"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _files(run_dir: Path) -> list[str]:
    """The supervised-token preview and the configuration, folded."""
    parts, preview = [], run_dir / "preview.html"
    if preview.is_file():  # a page of its own, so it goes into a frame
        page = escape(_text(preview))
        parts.append(f'<h2>What is supervised</h2><iframe srcdoc="{page}" title="preview"></iframe>')
    config = run_dir / "config.yaml"
    if config.is_file():
        text = escape(_text(config))
        parts.append(f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{text}</pre></details>")
    return parts


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError("RUN", str(file), f"it is not UTF-8 text ({error.reason})",
                          "Remove it, or repair it.") from error  # fmt: skip
