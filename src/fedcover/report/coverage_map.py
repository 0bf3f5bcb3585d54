"""A map of the coverage of every parameter tensor in every round."""

import math

from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedcover.report.format import shorten
from fedcover.report.loading import LoadedRun, printable
from fedcover.report.style import CARD, INK, MUTED, WARN, WIDTH, styled, whole_numbers

PALE, DEEP, HOLE = "#cfe2f3", "#0a4a88", "#d9490e"
"""Colours of coverage 1, full coverage and coverage 0; the same in both themes, since the map is a bitmap."""
MOST_SHADES = 20


def least_coverage(run: LoadedRun) -> tuple[list[str], list[list[float]]]:
    """Return the tensors in model order, and the least coverage of each in every round (nan where not recorded)."""
    names = list(dict.fromkeys(name for record in run.history for name in record.coverage))
    rows = [[float(r.coverage[name].least) if name in r.coverage else math.nan for r in run.history] for name in names]
    return names, rows


@styled
def coverage_figure(run: LoadedRun, most: int | None = None) -> Figure:
    """Draw least coverage as shades: one row per parameter tensor, one column per round; 0 stands out.

    Args:
        run: The run to draw.
        most: Coverage of the deepest shade, so that maps of several runs can share a scale; default: the largest
            cohort.
    """
    names, rows = least_coverage(run)
    most = most or max(len(record.cohort) for record in run.history)
    ramp = LinearSegmentedColormap.from_list("coverage", [PALE, DEEP], N=min(max(most, 1), MOST_SHADES))
    shades = ramp.with_extremes(under=HOLE, bad=(0, 0, 0, 0))
    scale = Normalize(0.5, max(most, 1) + 0.5)

    row_height = 0.24 if len(names) <= 16 else 0.155
    figure = Figure(figsize=(WIDTH, 1.25 + row_height * max(len(names), 2)), layout="constrained")
    axes = figure.subplots()
    axes.grid(False)
    first, last = run.history[0].round, run.history[0].round + len(run.history) - 1
    extent = (first - 0.5, last + 0.5, len(names) - 0.5, -0.5)
    axes.imshow(rows, cmap=shades, norm=scale, aspect="auto", interpolation="none", extent=extent)
    for edge in range(1, len(names)):
        axes.axhline(edge - 0.5, color=CARD, linewidth=1.2 if row_height > 0.2 else 0.5)
    labels = [shorten(printable(name), 30) for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=9.5 if row_height > 0.2 else 7, color=INK)
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
        aspect=34,
        shrink=0.8,
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
    if most <= 12:
        key.set_ticks(range(1, most + 1))
    else:  # no tick close to the 0
        key.set_ticks([tick for tick in MaxNLocator(6, integer=True).tick_values(1, most) if most / 12 <= tick <= most])
    key.ax.tick_params(labelsize=9, length=0, pad=2, colors=MUTED)
    zero = key.ax.annotate("0", (-0.035, 1.0), (0, 2), xycoords="axes fraction", textcoords="offset points")
    zero.set(ha="center", va="bottom", fontsize=9, color=WARN)
    key.set_label("clients that hold a tensor's least-held entry", fontsize=9, color=MUTED, loc="right")
