"""Line charts as inline SVG: no library, no script, so that a report is one file that opens anywhere."""

import math
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 34
NUM_TICKS = 5
LARGEST = 1e300  # drawn; what is larger is drawn there, so that no span overflows
_SMALLEST_SPAN = 1e-290  # below it, values are one
COLORS = ("#2f6fdf", "#d9591c", "#1d9a6c", "#a447c2", "#b8860b", "#d1345b", "#3a9fb5", "#6b7280")


@dataclass(frozen=True)
class Line:
    """One curve: points (x, y) in ascending x; `dots` draws them as single measurements."""

    label: str
    points: list[tuple[float, float]]
    dots: bool = False

    @property
    def drawn(self) -> list[tuple[float, float]]:
        """The points with no value beyond LARGEST."""
        return [(_within(x), _within(y)) for x, y in self.points]


@dataclass(frozen=True)
class Chart:
    """Curves that share their axes, in the order of the colors.

    Attributes:
        title: shown above.
        lines: each with points.
        x_label: shown below the x axis.
    """

    title: str
    lines: list[Line]
    x_label: str = "optimizer step"


def line_chart(chart: Chart) -> str:
    """A figure with its title, axes, grid, curves and legend.

    Args:
        chart: at least one line, each with points.
    """
    title, lines, x_label = chart.title, chart.lines, chart.x_label
    xs = [0.0, *(x for line in lines for x, _ in line.drawn)]  # one point alone has its place, too
    ys = [y for line in lines for _, y in line.drawn]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    scale = _Scale(min(xs), max(xs), y_ticks[0], y_ticks[-1])
    parts = [f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{scale.y(t):.1f}" y2="{scale.y(t):.1f}"/>'
             f'<text class="tick" x="{LEFT - 6}" y="{scale.y(t) + 4:.1f}" text-anchor="end">{_number(t)}</text>'
             for t in y_ticks]  # fmt: skip
    parts += [
        f'<text class="tick" x="{scale.x(t):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_number(t)}</text>'
        for t in x_ticks
        if min(xs) <= t <= max(xs)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="tick" x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
    parts += [_curve(line, number, scale) for number, line in enumerate(lines)]
    legend = "".join(f'<span><i class="key c{n}"></i>{escape(line.label)}</span>' for n, line in enumerate(lines))
    name = escape(title)
    picture = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">{"".join(parts)}</svg>'
    return f'<figure><figcaption>{name}</figcaption>{picture}<div class="legend">{legend}</div></figure>'


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that enclose [low, high], about `NUM_TICKS` of them."""
    low, high = _within(low), _within(high)
    # Closer than floating point can divide evenly: one value, with room above it.
    if high - low <= max(_SMALLEST_SPAN, 1e-12 * max(abs(low), abs(high))):
        high = low + max(0.1 * abs(low), _SMALLEST_SPAN) if abs(low) > _SMALLEST_SPAN else low + 0.1
    rough = (high - low) / (NUM_TICKS - 1)
    exponent = math.floor(math.log10(rough))
    step = next(f * 10.0**exponent for f in (1, 2, 2.5, 5, 10) if f * 10.0**exponent >= rough * 0.999)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(n * step, max(12, 3 - exponent)) for n in range(first, last + 1)]


def _within(value: float) -> float:
    return max(-LARGEST, min(LARGEST, value))


class _Scale:
    """Values to positions in the picture."""

    def __init__(self, x_low: float, x_high: float, y_low: float, y_high: float) -> None:
        self._x_low, self._x_span = x_low, (x_high - x_low) or 1.0
        self._y_low, self._y_span = y_low, (y_high - y_low) or 1.0

    def x(self, value: float) -> float:
        return LEFT + (value - self._x_low) / self._x_span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._y_low) / self._y_span * (HEIGHT - TOP - BOTTOM)


def _curve(line: Line, number: int, scale: _Scale) -> str:
    places = [(scale.x(x), scale.y(y)) for x, y in line.drawn]
    if line.dots or len(places) == 1:
        return "".join(f'<circle class="dot c{number}" cx="{x:.1f}" cy="{y:.1f}" r="5.5"/>' for x, y in places)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="curve c{number}" points="{path}"/>'


def _number(value: float) -> str:
    if 10000 <= abs(value) < 1e12:
        return f"{value / 1000:,.0f}k"
    return f"{value:g}"
