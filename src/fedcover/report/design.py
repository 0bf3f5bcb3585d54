"""The figure of a mask design: the frontier between coverage and noise, and what each client holds."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedcover.masks.design import Point, SegmentShare
from fedcover.report.style import CARD, INK, MUTED, RULE, WARN, WIDTH, colour, styled, whole_numbers


@styled
def design_figure(
    points: Sequence[Point],
    chosen: Point,
    code: Point | None,
    keeps: Sequence[float],
    holdings: Sequence[SegmentShare],
) -> Figure:
    """Draw the frontier above, and below it each client's part of each segment of the first layer.

    Args:
        points: The frontier.
        chosen: The point to mark on it.
        code: Coverage and noise of the budgets' own patterns, if they have any.
        keeps: What each client keeps.
        holdings: The clients' shares of each segment.
    """
    first = [holding for holding in holdings if holding.layer == holdings[0].layer]
    figure = Figure(figsize=(WIDTH, 3.4 + 0.2 * len(keeps)), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(2.4, 0.8 + 0.2 * len(keeps)))
    _draw_frontier(above, points, chosen, code)
    _draw_holders(below, first, keeps)
    return figure


def _draw_frontier(axes: Axes, points: Sequence[Point], chosen: Point, code: Point | None) -> None:
    axes.set_title("noise factor (N / Γ) × mean δ², and mean δ²")
    axes.set_xlabel("least coverage Γ")
    axes.xaxis.set_major_locator(whole_numbers())
    factors = {point.gamma: point.noise_factor for point in points if point.noise_factor is not None}
    (factor,) = axes.plot(list(factors), list(factors.values()), "o-", color=colour(0))
    (mean,) = axes.plot([p.gamma for p in points], [p.mean_noise for p in points], "o--", color=colour(1))
    factor.set_label("noise factor")
    mean.set_label("mean δ²")
    if chosen.noise_factor is not None:
        axes.plot([chosen.gamma], [chosen.noise_factor], "o", markersize=11, markerfacecolor="none", color=INK)
    if code and code.noise_factor is not None:
        (mark,) = axes.plot([code.gamma], [code.noise_factor], "x", markersize=8, color=WARN)
        mark.set_label("the code itself")
    axes.set_ylim(bottom=0)
    axes.legend(labelcolor=INK)


def _draw_holders(axes: Axes, holdings: Sequence[SegmentShare], keeps: Sequence[float]) -> None:
    axes.grid(False)
    layer = f" of {holdings[0].layer}" if holdings[0].layer else ""
    axes.set_title(f"what each client holds{layer}, by budget;\nbelow: how many clients hold it")
    for row, keep in enumerate(keeps):
        for holding in holdings:
            width = holding.end - holding.start
            axes.add_patch(Rectangle((holding.start, row - 0.4), width, 0.8, facecolor=RULE, edgecolor=CARD))
            begin, end = holding.begins[row], holding.begins[row] + holding.parts[row]
            for low, high in ((begin, min(end, 1.0)), (0.0, end - 1.0)):  # a part may wrap around the segment's end
                if high > low:
                    corner = (holding.start + low * width, row - 0.4)
                    axes.add_patch(Rectangle(corner, (high - low) * width, 0.8, facecolor=colour(0), edgecolor="none"))
        axes.text(-0.015, row, f"{keep:g}", ha="right", va="center", color=MUTED, fontsize=9)
    for holding in holdings:
        if holding.end - holding.start > 0.02:
            middle = (holding.start + holding.end) / 2
            axes.text(middle, len(keeps) - 0.1, f"{holding.holders}", ha="center", va="center", color=INK, fontsize=9)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(keeps) + 0.3, -0.6)
    axes.set_yticks([])
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["largest", "25 %", "50 %", "75 %", "smallest"])
