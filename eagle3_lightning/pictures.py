"""The report's charts as PNG files, for slides and pull requests; drawn by matplotlib, which only this needs."""

import re
from collections.abc import Sequence
from pathlib import Path

from eagle3_lightning.charts import COLORS, Chart
from eagle3_lightning.errors import ConfigError

_SIZE_INCHES, _DPI = (7.0, 3.6), 160


def write_pngs(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """One file for each chart, named after its place and title.

    Args:
        charts: those that have something to draw.
        directory: made if it is not there.

    Raises:
        ConfigError: matplotlib is not installed, or the directory cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--png", str(directory), "matplotlib is not installed", "pip install matplotlib.") from error
    files = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for number, chart in enumerate(charts, start=1):
            figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            for line, color in zip(chart.lines, COLORS, strict=False):
                steps, values = zip(*line.drawn, strict=True)
                single = line.dots or len(steps) == 1
                axes.plot(steps, values, "o" if single else "-", color=color, label=line.label, linewidth=1.8)
            axes.set_title(chart.title, fontsize=10, loc="left")
            axes.set_xlabel(chart.x_label, fontsize=9)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(fontsize=8, frameon=False)
            files.append(directory / f"{number:02d}_{_slug(chart.title)}.png")
            figure.savefig(files[-1], dpi=_DPI)
    except OSError as error:
        raise ConfigError(
            "--png", str(directory), f"it cannot be written ({error.strerror or error})", "Name another directory."
        ) from error
    return files


def _slug(title: str) -> str:
    words = re.findall(r"[a-z0-9]+", title.split("(")[0].lower())
    return "_".join(words[:5])
