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
from matplotlib.artist import Artist
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

SERIES_MARK, MAP_MARK = "series:", "map:"
"""Prefixes of the ids of artists that belong to a series, or that are a map; the names of series or rows follow."""
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.6), (1.3, 1.3), (6, 1.5, 1.3, 1.5))
WIDTH, TEXT = 4.4, 12
"""Width of figures in inches and size of their text in points: on a phone, text is at least 12 pixels high."""
ROW = 0.2
"""Height of a legend's row in inches."""
LONGEST_LABEL = 12
"""The longest name that fits beside a curve; longer ones go into a legend."""

_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": TEXT,
    "axes.linewidth": 0.7,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": MUTED,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.titlesize": TEXT,
    "figure.dpi": 100,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": TEXT,
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
    "xtick.labelsize": TEXT,
    "xtick.major.size": 3,
    "xtick.major.width": 0.7,
    "ytick.color": MUTED,
    "ytick.labelsize": TEXT,
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


def mark_series(artist: Artist, name: str) -> None:
    """Mark an artist as part of a series, so that a page can hide and highlight it with the rest of the series."""
    artist.set_gid(SERIES_MARK + name)


def draw_band(axes: Axes, xs: Sequence[float], low: Sequence[float], high: Sequence[float], index: int) -> Artist:
    """Draw a band in the index-th colour."""
    return axes.fill_between(xs, low, high, color=colour(index), alpha=0.13, linewidth=0)


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
    for line, name in zip(lines, names, strict=True):
        mark_series(line, name)
    if len(lines) > 10 or max(map(len, names)) > LONGEST_LABEL:
        add_legend(figure, lines, names)
        return
    low, high = axes.get_ylim()
    ends = [_end(line) for line in lines]
    heights = move_apart([(y - low) / (high - low) for _, y in ends], gap=0.088 * 3.0 / figure.get_figheight())
    right = axes.get_xlim()[1]
    for (x, y), height, line, name in zip(ends, heights, lines, names, strict=True):
        edge = (right - x) / (right - axes.get_xlim()[0])
        shade = str(line.get_color())
        leader = {"arrowstyle": "-", "color": shade, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 3, "alpha": 0.7}
        label = axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.045, height),
            textcoords="axes fraction",
            color=shade,
            va="center",
            annotation_clip=False,
            arrowprops=leader if edge > 0.01 or abs(height - (y - low) / (high - low)) > 0.01 else None,
        )
        mark_series(label, name)
        if label.arrow_patch:
            mark_series(label.arrow_patch, name)


def add_legend(figure: Figure, lines: Sequence[Line2D], names: Sequence[str]) -> None:
    """Add a legend with the curves' names above the axes, and make the figure taller for it."""
    shown = [shorten(name, 44) for name in names]
    for line, name in zip(lines, shown, strict=True):
        line.set_label(name)
    figure.set_figheight(figure.get_figheight() + _legend_height(shown))
    columns = _legend_columns(shown)
    figure.legend(handles=list(lines), loc="outside upper left", ncols=columns, handlelength=2.2, labelcolor=INK)


def without_legend(figure: Figure) -> Figure:
    """Return a figure of series without its legend and the room for it, for a page that has a legend of its own."""
    if not any((line.get_gid() or "").startswith(SERIES_MARK) for axes in figure.axes for line in axes.lines):
        return figure
    for legend in [*figure.legends]:
        figure.set_figheight(figure.get_figheight() - _legend_height([text.get_text() for text in legend.get_texts()]))
        legend.remove()
    return figure


def _legend_columns(names: Sequence[str]) -> int:
    return 2 if len(names) > 3 and max(map(len, names)) <= 18 else 1


def _legend_height(names: Sequence[str]) -> float:
    return 0.1 + ROW * -(-len(names) // _legend_columns(names))


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
