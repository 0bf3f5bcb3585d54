"""Curves over rounds from the outcomes of many runs: the mean over seeds of each row, and the distance to full models.

Runs with the same seed have the same initial model, split and cohorts. A row is therefore compared with full models
seed by seed: most fluctuations of single rounds are common to both and cancel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

from fedcover.report.style import (
    DASHES,
    SERIES,
    WIDTH,
    add_legend,
    colour,
    draw_band,
    draw_line,
    fit_rounds,
    mark_series,
    styled,
)
from fedcover_experiments.results import Outcome

Column = Literal["loss", "accuracy"]
Values = NDArray[np.float64]

MOST_BANDS = 5
"""The largest number of curves with bands; more bands would hide each other."""
LOG_FROM = 3
"""A loss that falls by more than this factor has a logarithmic scale."""
GREY = 5
"""The colour of full models, the reference in every figure."""
_OTHERS = [index for index in range(len(SERIES)) if index != GREY]


def style_of(shade: int, dash: int) -> int:
    """Return the index of the curve style with this colour and this dash pattern.

    >>> from fedcover.report.style import dashes
    >>> dashes(style_of(3, 2)) == DASHES[2], colour(style_of(3, 2)) == colour(3)
    (True, True)
    """
    return shade + len(SERIES) * ((dash - shade) % len(DASHES))


def style_of_row(number: int) -> int:
    """Return the style of a figure's number-th row, full models not counted: colours and dashes alternate."""
    return style_of(_OTHERS[number % len(_OTHERS)], number % len(DASHES))


FULL_STYLE = style_of(GREY, 0)


@dataclass(frozen=True)
class Points:
    """Mean and standard deviation over seeds, in the rounds in which the runs of all seeds were evaluated."""

    rounds: list[int]
    mean: Values
    spread: Values


@dataclass(frozen=True)
class Curve:
    """One row of the paper with its outcomes, one for each seed."""

    name: str
    style: int
    outcomes: tuple[Outcome, ...]

    @property
    def full(self) -> bool:
        """True for full models."""
        return self.outcomes[0].policy == "full"

    @property
    def label(self) -> str:
        """The entry of the legend: the name and Gamma_min."""
        return f"{self.name}, Γmin {min(outcome.gamma_min for outcome in self.outcomes)}"

    def points(self, column: Column) -> Points:
        """Return test loss, or test accuracy in percent, over rounds."""
        return _over_seeds([_values(outcome, column) for outcome in self.outcomes])

    def against(self, other: "Curve", column: Column) -> Points:
        """Return the difference from another row, seed by seed: of losses in percent, of accuracies in points.

        Each value is the mean over a tenth of all rounds, since single rounds are noisy with non-IID data.
        """
        theirs = {outcome.seed: _values(outcome, column) for outcome in other.outcomes}
        pairs = [(_values(o, column), theirs[o.seed]) for o in self.outcomes if o.seed in theirs]
        return _over_seeds([100 * (a / b - 1) if column == "loss" else a - b for a, b in pairs], smooth=True)


def _values(outcome: Outcome, column: Column) -> Values:
    values, scale = (outcome.loss, 1) if column == "loss" else (outcome.accuracy, 100)
    return scale * np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _over_seeds(rows: Sequence[Values], smooth: bool = False) -> Points:
    if not rows:
        return Points([], np.empty(0), np.empty(0))
    table = np.stack(rows)
    rounds = 1 + np.flatnonzero(np.isfinite(table).all(axis=0))
    table = table[:, rounds - 1]
    if smooth:
        window = tenth(len(rows[0]))
        at = rounds[rounds >= window]
        means = [table[:, (rounds > last - window) & (rounds <= last)].mean(axis=1) for last in at]
        rounds, table = at, np.stack(means, axis=1) if means else table[:, :0]
    spread = table.std(axis=0, ddof=1) if len(rows) > 1 else np.zeros(len(rounds))
    return Points(rounds.tolist(), table.mean(axis=0), spread)


def tenth(rounds: int) -> int:
    """Return a tenth of the rounds, but at least 1.

    >>> tenth(100), tenth(5)
    (10, 1)
    """
    return max(1, rounds // 10)


@styled
def curves_figure(curves: Sequence[Curve], column: Column) -> Figure:
    """Draw the curves with a legend and, if full models are among them, the differences from full models below."""
    full = next((curve for curve in curves if curve.full), None)
    others = [curve for curve in curves if not curve.full]
    compared = [(curve, curve.against(full, column)) for curve in others] if full else []
    compared = [(curve, points) for curve, points in compared if points.rounds]
    figure = Figure(figsize=(WIDTH, 4.5 if compared else 3.0), layout="constrained")
    heights = (3, 2) if compared else (1,)
    panels: list[Axes] = list(figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0])
    drawn = [(curve, curve.points(column)) for curve in curves]
    bands = len(curves) <= MOST_BANDS
    lines = _draw(panels[0], drawn, bands)
    _fit(panels[0], [points for _, points in drawn], column)
    fit_rounds(panels[0], [at for _, points in drawn for at in points.rounds])
    if compared:
        below = panels[1]
        below.axhline(0, color=colour(FULL_STYLE))
        _draw(below, compared, bands)
        reach = [points.spread if bands else 0 * points.spread for _, points in compared]
        edges = [p.mean + sign * r for (_, p), r in zip(compared, reach, strict=True) for sign in (-1, 1)]
        _fit_late(below, [*edges, np.zeros(1)])
        below.set_title(_difference(column, tenth(len(curves[0].outcomes[0].loss))))
    panels[-1].set_xlabel("round")
    add_legend(figure, lines, [curve.label for curve in curves])
    return figure


def _difference(column: Column, window: int) -> str:
    title = f"difference from FullNets, {'%' if column == 'loss' else 'points'}"
    return title if window == 1 else f"{title},\nmean of the last {window} rounds"


def _draw(axes: Axes, drawn: Sequence[tuple[Curve, Points]], bands: bool) -> list[Line2D]:
    lines = []
    for curve, points in drawn:
        if bands:
            low, high = points.mean - points.spread, points.mean + points.spread
            mark_series(draw_band(axes, points.rounds, low.tolist(), high.tolist(), curve.style), curve.name)
        lines.append(draw_line(axes, points.rounds, points.mean.tolist(), curve.style))
        mark_series(lines[-1], curve.name)
    return lines


def _fit(axes: Axes, drawn: Sequence[Points], column: Column) -> None:
    """Choose a scale on which late rounds, where the rows differ, can be distinguished."""
    if column == "accuracy":
        axes.set_title("test accuracy, %")
        _fit_late(axes, [points.mean for points in drawn])
        return
    values = np.concatenate([points.mean for points in drawn])
    if 0 < LOG_FROM * values.min() < values.max():
        axes.set_title("test loss, log scale")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 6)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_title("test loss")


def _fit_late(axes: Axes, drawn: Sequence[Values]) -> None:
    """Set limits around all values but the first tenth."""
    late = np.concatenate([values[len(values) // 10 :] for values in drawn])
    margin = 0.06 * (late.max() - late.min()) or 0.5
    axes.set_ylim(late.min() - margin, late.max() + margin)
