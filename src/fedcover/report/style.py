"""The style of figures: colours, line styles, axes, and labels beside curves.

The colours are those of the light theme. ``svg.py`` turns each into a CSS variable of the same name, so that the
figures on a page follow its theme. Therefore figures use only colours that have a name in ``COLOURS``.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fedcover.report.format import shorten

INK, MUTED, RULE, CARD, WARN = "#1d2126", "#59626c", "#dfe2e6", "#fefefe", "#d9480f"
SERIES = ("#0066b3", "#b36a02", "#00805b", "#9b4a87", "#9a2b40", "#5a626d", "#687701", "#1b86a1")
COLOURS = {"ink": INK, "muted": MUTED, "rule": RULE, "card": CARD, "warn": WARN} | {
    f"series-{number}": colour for number, colour in enumerate(SERIES, 1)
}
"""The colour of each theme variable in the light theme; ``page.css`` has the dark ones."""

DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.6), (1.3, 1.3), (6, 1.5, 1.3, 1.5))
WIDTH = 5.2
"""Width of figures in inches: narrow, so that their text stays readable on a phone."""
LONGEST_LABEL = 16
"""The longest name that fits beside a curve; longer ones go into a legend."""

_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 10,
    "axes.linewidth": 0.7,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlesize": 10,
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "fedcover",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
}

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def figure_style() -> Iterator[None]:
    """Use this style instead of the caller's matplotlib settings inside the block."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Return a drawing function that runs inside ``figure_style``."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with figure_style():
            return draw(*args, **kwargs)

    return drawn


def colour(index: int) -> str:
    """Return the colour of the index-th run."""
    return SERIES[index % len(SERIES)]


def dashes(index: int) -> tuple[float, ...]:
    """Return the dash pattern of the index-th run in line widths; it repeats out of step with the colours."""
    return DASHES[(index + index // len(SERIES)) % len(DASHES)]


def new_axes(measure: str, x: str = "round", height: float = 3.0) -> tuple[Figure, Axes]:
    """Return a figure with one pair of axes, and the measure as a horizontal title above the y axis."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(measure)
    axes.set_xlabel(x)
    return figure, axes


def draw_line(axes: Axes, xs: Sequence[float], ys: Sequence[float], index: int = 0, step: bool = False) -> Line2D:
    """Draw a curve in the index-th colour and dashes, with markers if it has few points."""
    (line,) = axes.plot(xs, ys, color=colour(index), drawstyle="steps-mid" if step else "default")
    if len(xs) > 200:
        line.set_linewidth(1.0)
    if dashes(index) and len(xs) > 1:
        line.set_dashes(dashes(index))
        line.set_dash_capstyle("butt")
    if len(xs) <= 25:
        line.set(marker="o", markersize=3 if len(xs) > 1 else 5)
    return line


def fit_rounds(axes: Axes, rounds: Sequence[int]) -> None:
    """Fit the x axis to the rounds, with ticks at whole numbers."""
    first, last = min(rounds), max(rounds)
    axes.set_xlim((first - 0.5, last + 0.5) if last - first < 2 else (first, last))
    axes.xaxis.set_major_locator(whole_numbers())


def whole_numbers() -> MaxNLocator:
    """Return a locator of ticks at round whole numbers, such as 20, 40, 60."""
    return MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)


def name_lines(figure: Figure, axes: Axes, lines: Sequence[Line2D], names: Sequence[str]) -> None:
    """Write each curve's name beside its end, or in a legend above if names are long or many."""
    if len(lines) > 12 or max(map(len, names)) > LONGEST_LABEL:
        add_legend(figure, lines, names)
        return
    low, high = axes.get_ylim()
    ends = [_end(line) for line in lines]
    heights = move_apart([(y - low) / (high - low) for _, y in ends], gap=0.076 * 3.0 / figure.get_figheight())
    right = axes.get_xlim()[1]
    for (x, y), height, line, name in zip(ends, heights, lines, names, strict=True):
        edge = (right - x) / (right - axes.get_xlim()[0])
        shade = str(line.get_color())
        leader = {"arrowstyle": "-", "color": shade, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3, "alpha": 0.7}
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.045, height),
            textcoords="axes fraction",
            color=shade,
            va="center",
            annotation_clip=False,
            arrowprops=leader if edge > 0.01 or abs(height - (y - low) / (high - low)) > 0.01 else None,
        )


def add_legend(figure: Figure, lines: Sequence[Line2D], names: Sequence[str]) -> None:
    """Add a legend with the curves' names above the axes, and make the figure taller for it."""
    for line, name in zip(lines, names, strict=True):
        line.set_label(shorten(name, 56))
    columns = 2 if len(lines) > 3 and max(map(len, names)) <= 26 else 1
    rows = -(-len(lines) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows + 0.1)
    figure.legend(handles=list(lines), loc="outside upper left", ncols=columns, handlelength=2.6, labelcolor=INK)


def _end(line: Line2D) -> tuple[float, float]:
    """Return the curve's last point."""
    points: Any = line.get_xydata()
    return float(points[-1][0]), float(points[-1][1])


def move_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Return heights at least ``gap`` apart, near the original ones, and within 0 to 1 where there is room."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    placed = [heights[index] for index in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    if placed and placed[-1] > 1:
        placed[-1] = 1.0
        for i in range(len(placed) - 2, -1, -1):
            placed[i] = min(placed[i], placed[i + 1] - gap)
    result = [0.0] * len(heights)
    for index, height in zip(order, placed, strict=True):
        result[index] = height
    return result
