"""The costs of pruned models as shares of those of full models."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcover.report import format as cells
from fedcover.report.measures import mean
from fedcover.report.methods import MethodRuns
from fedcover.report.style import INK, MUTED, RULE, WIDTH, colour, mark_series, styled

COSTS = {"bytes_share": "bytes sent", "macs_share": "multiply-adds", "kept": "entries held"}


@styled
def cost_figure(methods: Sequence[MethodRuns]) -> Figure:
    """Draw bytes, multiply-adds and entries of the pruned models as bars against the full model's 100 %."""
    if len(methods) == 1:
        figure = Figure(figsize=(WIDTH, 2.2), layout="constrained")
        _draw_bars(figure.subplots(), list(COSTS.values()), [_share(methods[0], cost) for cost in COSTS], [0, 0, 0])
        return figure
    figure = Figure(figsize=(WIDTH, 3 * (0.45 + 0.25 * len(methods))), layout="constrained")
    panels = figure.subplots(len(COSTS), 1, sharex=True, squeeze=False)[:, 0]
    labels = [cells.shorten(method.name, 16) for method in methods]
    for axes, (cost, title) in zip(panels, COSTS.items(), strict=True):
        shares = [_share(method, cost) for method in methods]
        marked = [method.name for method in methods]
        _draw_bars(axes, labels, shares, list(range(len(methods))), marked)
        axes.set_title(f"{title}, %")
    return figure


def _share(method: MethodRuns, cost: str) -> float | None:
    return mean(share for numbers in method.measures if (share := getattr(numbers, cost)) is not None)


def _draw_bars(
    axes: Axes, labels: Sequence[str], shares: Sequence[float | None], styles: Sequence[int], marked: Sequence[str] = ()
) -> None:
    """Draw horizontal bars, the first on top, each over a pale bar of 100 % and with its number.

    Args:
        axes: Where to draw.
        labels: A label for each bar.
        shares: The shares that the bars show.
        styles: The number of each bar's colour.
        marked: The series to which each bar belongs, if bars are compared.
    """
    rows = range(len(labels))
    axes.grid(False)
    axes.barh(rows, [100] * len(labels), height=0.7, color=RULE)
    bars = axes.barh(rows, [100 * (share or 0) for share in shares], height=0.7, color=[colour(i) for i in styles])
    axes.axvline(100, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    longest = max([1.0, *(share for share in shares if share is not None)])
    axes.set_yticks(rows, labels, color=INK)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.set_xlim(0, 100 * longest)
    axes.set_xticks([0, 50, 100])
    axes.set_xlabel("" if marked else "% of the full model's")
    for row, share in zip(rows, shares, strict=True):
        note = axes.annotate(
            cells.percent(share, 0 if marked else 1),
            (1.02, row),
            xycoords=("axes fraction", "data"),
            va="center",
            color=INK,
            annotation_clip=False,
        )
        if marked:
            for artist in (bars[row], note, axes.yaxis.get_major_ticks()[row].label1):
                mark_series(artist, marked[row])
