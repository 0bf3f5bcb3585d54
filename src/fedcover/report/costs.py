"""The costs of pruned models as shares of those of full models."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcover.report import format as cells
from fedcover.report.loading import LoadedRun
from fedcover.report.measures import Measures, measure
from fedcover.report.style import INK, MUTED, RULE, WIDTH, colour, styled

COSTS = {"bytes_share": "bytes sent", "macs_share": "multiply-adds", "kept": "entries held"}


@styled
def cost_figure(runs: Sequence[LoadedRun]) -> Figure:
    """Draw bytes, multiply-adds and entries of the pruned models as bars against the full model's 100 %."""
    numbers = [measure(run.history) for run in runs]
    if len(runs) == 1:
        figure = Figure(figsize=(WIDTH, 1.9), layout="constrained")
        _draw_bars(figure.subplots(), list(COSTS.values()), [_share(numbers[0], cost) for cost in COSTS], [0, 0, 0])
        return figure
    figure = Figure(figsize=(WIDTH, 0.9 + 0.3 * len(runs)), layout="constrained")
    panels = figure.subplots(1, len(COSTS), sharey=True, squeeze=False)[0]
    for axes, (cost, title) in zip(panels, COSTS.items(), strict=True):
        shares = [_share(measures, cost) for measures in numbers]
        _draw_bars(axes, [cells.shorten(run.name, 22) for run in runs], shares, list(range(len(runs))), brief=True)
        axes.set_title(title)
    return figure


def _share(numbers: Measures, cost: str) -> float | None:
    share: float | None = getattr(numbers, cost)
    return share


def _draw_bars(
    axes: Axes, labels: Sequence[str], shares: Sequence[float | None], series: Sequence[int], brief: bool = False
) -> None:
    """Draw horizontal bars, the first on top, each over a pale bar of 100 % and followed by its number."""
    rows = range(len(labels))
    axes.grid(False)
    axes.barh(rows, [100] * len(labels), height=0.58, color=RULE)
    axes.barh(rows, [100 * (share or 0) for share in shares], height=0.58, color=[colour(index) for index in series])
    axes.axvline(100, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    longest = max([1.0, *(share for share in shares if share is not None)])
    for row, share in zip(rows, shares, strict=True):
        axes.annotate(
            _saving(share, brief),
            (100 * max(share or 0, 1), row),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=9,
            annotation_clip=False,
        )
    axes.set_yticks(rows, labels, color=INK)
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.set_xlim(0, 100 * longest)
    axes.set_xticks([0, 50, 100])
    axes.set_xlabel("" if brief else "% of the full model's")


def _saving(share: float | None, brief: bool) -> str:
    if share is None or brief:
        return cells.percent(share, 0)
    saved = 1 - share
    if abs(saved) < 0.0005:
        return "100 %: nothing saved"
    return f"{cells.percent(share, 1)}: {cells.percent(abs(saved), 1)} {'saved' if saved > 0 else 'more'}"
