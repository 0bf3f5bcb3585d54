"""Curves over rounds: metrics, loss, Gamma_min and delta^2 of one run, of several runs, or of methods over seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcover.federation.history import RoundRecord
from fedcover.report.loading import LoadedRun
from fedcover.report.measures import metrics_of
from fedcover.report.methods import MethodRuns
from fedcover.report.style import (
    MUTED,
    WARN,
    draw_band,
    draw_line,
    fit_rounds,
    mark_series,
    name_lines,
    new_axes,
    styled,
    whole_numbers,
)

MOST_POINTS = 500
"""More single delta^2 values than this are thinned out; the band still covers all of them."""
MOST_BANDS = 6
"""The largest number of curves with bands; more bands would hide each other."""

Value = Callable[[RoundRecord], float | None]


@dataclass(frozen=True)
class SeriesPoints:
    """The mean over a method's runs in each round in which all of them were measured, and mean ± deviation."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def spread(self) -> bool:
        """True if there are several runs."""
        return self.low != self.high


def column(name: str) -> Value:
    """Return a function that reads a field of a record."""
    return lambda record: getattr(record, name)


def metric(name: str) -> Value:
    """Return a function that reads a metric of a record."""
    return lambda record: metrics_of(record).get(name)


def measured(run: LoadedRun, value: Value) -> dict[int, float]:
    """Return the value of each round in which it is a finite number."""
    values = {record.round: value(record) for record in run.history}
    return {index: float(number) for index, number in values.items() if number is not None and math.isfinite(number)}


def over_seeds(method: MethodRuns, value: Value, scale: float = 1) -> SeriesPoints:
    """Return a method's mean and standard deviation over its seeds."""
    runs = [measured(run, value) for run in method.runs]
    rounds = [index for index in runs[0] if all(index in run for run in runs)]
    values = [[scale * run[index] for run in runs] for index in rounds]
    means = [fmean(row) for row in values]
    spreads = [stdev(row) if len(row) > 1 else 0.0 for row in values]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
    return SeriesPoints(rounds, means, low, [mean + spread for mean, spread in zip(means, spreads, strict=True)])


@styled
def metric_figure(methods: Sequence[MethodRuns], name: str) -> Figure:
    """Draw a metric over rounds, accuracy in percent; for a single run also the clients' local accuracy."""
    if name != "accuracy":
        figure, axes = new_axes(name)
        _draw_columns(figure, axes, methods, {name: metric(name)}, scale=1)
        return figure
    figure, axes = new_axes("accuracy, %")
    columns = {"global model": metric(name)}
    if _is_single(methods):
        columns["local"] = column("local_accuracy")
    _draw_columns(figure, axes, methods, columns, scale=100)
    return figure


@styled
def loss_figure(methods: Sequence[MethodRuns]) -> Figure:
    """Draw test loss over rounds; for a single run also the clients' training loss."""
    figure, axes = new_axes("loss")
    columns = {"test": column("loss")}
    if _is_single(methods):
        columns["training"] = column("train_loss")
    _draw_columns(figure, axes, methods, columns, scale=1)
    return figure


@styled
def gamma_min_figure(methods: Sequence[MethodRuns]) -> Figure:
    """Draw Gamma_min over rounds, the least over seeds, from 0 to the cohort's size; rounds at 0 are marked."""
    figure, axes = new_axes("least coverage Γmin, clients")
    lines = []
    for index, method in enumerate(methods):
        runs = [measured(run, column("gamma_min")) for run in method.runs]
        least = {at: min(run[at] for run in runs if at in run) for at in sorted({at for run in runs for at in run})}
        lines.append(draw_line(axes, list(least), list(least.values()), index, step=True))
        uncovered = [at for at, value in least.items() if value == 0]
        if uncovered:
            (dots,) = axes.plot(uncovered, [0] * len(uncovered), "o", color=WARN, markersize=3.5)
            dots.set(clip_on=False, zorder=3)
            mark_series(dots, method.name)
    cohort = max(len(record.cohort) for record in _records(methods))
    axes.axhline(cohort, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_ylim(0, max(cohort, 1) * 1.15)
    axes.yaxis.set_major_locator(whole_numbers())
    _fit(axes, methods)
    note = axes.text(0.005, 1.02 * cohort, f"all {cohort} clients", transform=axes.get_yaxis_transform(), color=MUTED)
    note.set(in_layout=False)
    _name(figure, axes, lines, [method.name for method in methods], len(methods) > 1)
    return figure


@styled
def pruning_noise_figure(methods: Sequence[MethodRuns]) -> Figure:
    """Draw delta^2 over rounds: the cohort's mean as a line, its range as a band, and for one run each client."""
    figure, axes = new_axes("pruning noise δ²")
    lines, top = [], 0.0
    for index, method in enumerate(methods):
        points = over_seeds(method, column("pruning_noise"))
        noises: dict[int, list[float]] = {}
        for record in _records([method]):
            noises.setdefault(record.round, []).extend(record.pruning_noises)
        spans = {at: (min(values), max(values)) for at, values in sorted(noises.items()) if values}
        low, high = [span[0] for span in spans.values()], [span[1] for span in spans.values()]
        if len(methods) <= 4:
            mark_series(draw_band(axes, list(spans), low, high, index), method.name)
        if _is_single(methods):
            _draw_clients(axes, method.runs[0])
        lines.append(draw_line(axes, points.rounds, points.mean, index))
        top = max([top, *filter(math.isfinite, [*points.mean, *high])])
    axes.set_ylim(0, 1.08 * top or 1)
    _fit(axes, methods)
    _name(figure, axes, lines, [method.name for method in methods], len(methods) > 1)
    return figure


@styled
def accuracy_by_megabytes_figure(methods: Sequence[MethodRuns], name: str = "accuracy") -> Figure:
    """Draw a metric against the megabytes sent so far, down and up: means over seeds."""
    percent = name == "accuracy"
    figure, axes = new_axes("accuracy, %" if percent else name, x="MB sent so far, down and up")
    lines, names = [], []
    for index, method in enumerate(methods):
        points = over_seeds(method, metric(name), 100 if percent else 1)
        totals = [list(accumulate(r.bytes_down + r.bytes_up for r in run.history)) for run in method.runs]
        sent = [
            dict(zip((r.round for r in run.history), t, strict=True))
            for run, t in zip(method.runs, totals, strict=True)
        ]
        if points.rounds:
            megabytes = [fmean(run[at] for run in sent) / 1e6 for at in points.rounds]
            lines.append(draw_line(axes, megabytes, points.mean, index))
            names.append(method.name)
    if percent:
        _cap_percent(axes)
    axes.margins(x=0)
    axes.set_xlim(left=0)
    _name(figure, axes, lines, names, bool(lines))
    return figure


def _draw_columns(
    figure: Figure, axes: Axes, methods: Sequence[MethodRuns], columns: dict[str, Value], scale: float
) -> None:
    """Draw one curve per method, or for one run one per column; leave out curves without values."""
    lines: list[Line2D] = []
    names: list[str] = []
    single = _is_single(methods)
    for method_index, method in enumerate(methods):
        for column_index, (title, value) in enumerate(columns.items()):
            points = over_seeds(method, value, scale)
            if points.rounds:
                index, name = method_index + column_index, title if single else method.name
                if points.spread and len(methods) <= MOST_BANDS:
                    mark_series(draw_band(axes, points.rounds, points.low, points.high, index), name)
                lines.append(draw_line(axes, points.rounds, points.mean, index))
                names.append(name)
    if scale == 100:
        _cap_percent(axes)
    elif lines and 0 <= axes.get_ylim()[0] < 0.35 * axes.get_ylim()[1]:
        axes.set_ylim(bottom=0)
    _fit(axes, methods)
    _name(figure, axes, lines, names, len(lines) > 1 or not single)


def _name(figure: Figure, axes: Axes, lines: Sequence[Line2D], names: Sequence[str], shown: bool) -> None:
    """Mark the curves with their names, and write the names if they are to be shown."""
    for line, name in zip(lines, names, strict=True):
        mark_series(line, name)
    if shown and lines:
        name_lines(figure, axes, lines, names)


def _draw_clients(axes: Axes, run: LoadedRun) -> None:
    """Draw one point per client and round, or an even sample of them if there are too many."""
    points = [(record.round, noise) for record in run.history for noise in record.pruning_noises]
    step = max(-(-len(points) // MOST_POINTS), 1)
    while math.gcd(step, len(run.history.last.cohort) or 1) > 1:  # otherwise the sample would always hit the same slots
        step += 1
    if points:
        axes.plot(*zip(*points[::step], strict=True), "o", markersize=2, markeredgewidth=0, color=MUTED, alpha=0.6)


def _sent_so_far(run: LoadedRun) -> dict[int, int]:
    """Return the bytes sent up to each round, down and up."""
    totals = accumulate(record.bytes_down + record.bytes_up for record in run.history)
    return dict(zip(run.history.column("round"), totals, strict=True))


def _is_single(methods: Sequence[MethodRuns]) -> bool:
    return len(methods) == 1 and len(methods[0].runs) == 1


def _records(methods: Sequence[MethodRuns]) -> list[RoundRecord]:
    return [record for method in methods for run in method.runs for record in run.history]


def _fit(axes: Axes, methods: Sequence[MethodRuns]) -> None:
    fit_rounds(axes, [record.round for record in _records(methods)])


def _cap_percent(axes: Axes) -> None:
    """Limit the y axis to 0 to 100, and keep it so wide that noise does not look like a trend."""
    low, high = axes.get_ylim()
    if high - low < 1:
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    axes.set_ylim(max(low, 0), min(high, 100.5))
