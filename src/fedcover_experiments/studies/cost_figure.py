"""The figure of the map of costs: accuracy against each cost, with Pareto fronts."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcover.calibration.cost_map import RESOURCES, CostMap
from fedcover.report.style import INK, MUTED, WIDTH, add_legend, colour, styled

COMPLEMENTS = ("zero", "frozen", "quantized", "kept")
"""The complements in the order of their colours."""
MARKERS = ("o", "s", "^", "D")
HEIGHT = 2.3
"""Height of a panel in inches."""


@styled
def cost_map_figure(costs: CostMap, titles: Mapping[str, str]) -> Figure:
    """Draw a panel for each resource, below each other, and a column for each split.

    Args:
        costs: The map.
        titles: The titles of splits.
    """
    splits = list(costs.full)
    figure = Figure(figsize=(WIDTH * max(1, len(splits)), HEIGHT * len(RESOURCES)), layout="constrained")
    panels = figure.subplots(len(RESOURCES), max(1, len(splits)), squeeze=False, sharey="col")
    for column, split in enumerate(splits):
        for axes, resource in zip(panels[:, column], RESOURCES, strict=True):
            _draw(axes, costs, split, resource)
            axes.set_xlabel(f"{resource}, % of a full client's")
        panels[0, column].set_title(f"{titles[split]}: accuracy, %")
    kinds = [kind for kind in COMPLEMENTS if any(setting.complement == kind for setting in costs.settings)]
    handles = [Line2D([], [], linestyle="", marker=_marker(kind), color=_colour(kind)) for kind in kinds]
    handles += [
        Line2D([], [], color=INK, linewidth=1),
        Line2D([], [], color=MUTED, linewidth=0.8, linestyle=(0, (1, 2))),
    ]
    add_legend(figure, handles, [*kinds, "front", "full FedAvg"])
    return figure


def _draw(axes: Axes, costs: CostMap, split: str, resource: str) -> None:
    """Draw all settings as marks, their front as steps, and full FedAvg as a line."""
    for kind in COMPLEMENTS:
        points = [(100 * s.costs[resource], s.accuracy) for s in costs.of_split(split) if s.complement == kind]
        if points:
            axes.plot(*zip(*points, strict=True), _marker(kind), markersize=4, color=_colour(kind), alpha=0.8)
    front = costs.front(split, resource)
    shares = [100 * setting.costs[resource] for setting in front]
    axes.step([*shares, max(105, *shares)], [*(s.accuracy for s in front), front[-1].accuracy], where="post",
              color=INK, linewidth=1, zorder=1)  # fmt: skip
    axes.axhline(costs.full_accuracy(split), color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_xlim(0, max(105, *(100 * s.costs[resource] for s in costs.of_split(split))))


def _marker(complement: str) -> str:
    return MARKERS[COMPLEMENTS.index(complement)]


def _colour(complement: str) -> str:
    return colour(COMPLEMENTS.index(complement))
