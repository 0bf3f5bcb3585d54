"""A map of the coverage of every parameter tensor in every round."""

import math

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcover.report.format import shorten
from fedcover.report.loading import printable
from fedcover.report.methods import MethodRuns
from fedcover.report.style import CARD, INK, MAP_MARK, MUTED, TEXT, WARN, WIDTH, styled, whole_numbers

PALE, DEEP, HOLE = "#cfe2f3", "#0a4a88", "#d9490e"
"""Colours of coverage 1, full coverage and coverage 0; the same in both themes, since the map is a bitmap."""
MOST_SHADES = 20
LONGEST_NAME = 20
"""Longer names of tensors are shortened; a page shows them whole."""


def least_coverage(method: MethodRuns) -> tuple[list[str], list[int], list[list[float]]]:
    """Return the tensors in model order, the rounds, and the least coverage of each tensor in each round.

    It is the least over the method's seeds, and nan where nothing was recorded.
    """
    records = [record for run in method.runs for record in run.history]
    names = list(dict.fromkeys(name for record in records for name in record.coverage))
    rounds = list(range(min(r.round for r in records), max(r.round for r in records) + 1))
    least: dict[tuple[str, int], float] = {}
    for record in records:
        for name, layer in record.coverage.items():
            key = name, record.round
            least[key] = min(least.get(key, math.inf), float(layer.least))
    return names, rounds, [[least.get((name, at), math.nan) for at in rounds] for name in names]


@styled
def coverage_figure(method: MethodRuns, most: int | None = None) -> Figure:
    """Draw least coverage as shades: one row per parameter tensor, one column per round; 0 stands out.

    Args:
        method: The runs to draw.
        most: Coverage of the deepest shade, so that several maps can share a scale; default: the largest cohort.
    """
    names, rounds, rows = least_coverage(method)
    most = most or max(len(record.cohort) for run in method.runs for record in run.history)
    ramp = LinearSegmentedColormap.from_list("coverage", [PALE, DEEP], N=min(max(most, 1), MOST_SHADES))
    shades = ramp.with_extremes(under=HOLE, bad=(0, 0, 0, 0))
    scale = Normalize(0.5, max(most, 1) + 0.5)

    row_height = 0.24 if len(names) <= 16 else 0.2
    figure = Figure(figsize=(WIDTH, 1.35 + row_height * max(len(names), 2)), layout="constrained")
    axes = figure.subplots()
    axes.grid(False)
    extent = (rounds[0] - 0.5, rounds[-1] + 0.5, len(names) - 0.5, -0.5)
    image = axes.imshow(rows, cmap=shades, norm=scale, aspect="auto", interpolation="none", extent=extent)
    image.set_gid(MAP_MARK + "\n".join(map(printable, names)))
    for edge in range(1, len(names)):
        axes.axhline(edge - 0.5, color=CARD, linewidth=1.2 if row_height > 0.2 else 0.5)
    labels = [shorten(printable(name), LONGEST_NAME) for name in names]
    axes.set_yticks(range(len(names)), labels, color=INK)
    axes.xaxis.set_major_locator(whole_numbers())
    axes.set_xlabel("round")
    _draw_key(figure, ScalarMappable(scale, shades), most)
    return figure


def _draw_key(figure: Figure, shades: ScalarMappable, most: int) -> None:
    """Draw the scale above the map: one warning patch for 0, then the shades from 1 to ``most`` clients."""
    key = figure.colorbar(
        shades,
        ax=figure.axes[0],
        location="top",
        aspect=28,
        shrink=0.9,
        anchor=(1.0, 0.0),
        pad=0.02,
        extend="min",
        extendrect=True,
        extendfrac=0.07,
        drawedges=False,
    )
    key.outline.set_visible(False)
    if key.solids is not None:
        key.solids.set_edgecolor("face")
    if most <= 10:
        key.set_ticks(range(1, most + 1))
    else:  # no tick close to the 0
        key.set_ticks([tick for tick in MaxNLocator(5, integer=True).tick_values(1, most) if most / 12 <= tick <= most])
    key.ax.tick_params(labelsize=TEXT, length=0, pad=2, colors=MUTED)
    zero = key.ax.annotate("0", (-0.035, 1.0), (0, 2), xycoords="axes fraction", textcoords="offset points")
    zero.set(ha="center", va="bottom", color=WARN)
    key.set_label("clients that hold the least-held entry", color=MUTED, loc="right")
