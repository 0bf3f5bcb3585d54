"""Curves over rounds of one run or several: accuracy, loss, Gamma_min, delta^2; and accuracy against megabytes."""

import math
from collections.abc import Sequence
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedcover.report.loading import LoadedRun
from fedcover.report.style import (
    MUTED,
    WARN,
    colour,
    draw_line,
    fit_rounds,
    name_lines,
    new_axes,
    styled,
    whole_numbers,
)

MOST_POINTS = 500
"""More single delta^2 values than this are thinned out; the band still covers all of them."""


def measured(run: LoadedRun, name: str) -> tuple[list[int], list[float]]:
    """Return the rounds in which a column of the history is a finite number, and the numbers."""
    pairs = [(record.round, getattr(record, name)) for record in run.history]
    finite = [(index, float(value)) for index, value in pairs if value is not None and math.isfinite(value)]
    return [index for index, _ in finite], [value for _, value in finite]


@styled
def accuracy_figure(runs: Sequence[LoadedRun]) -> Figure:
    """Draw test accuracy over rounds; for a single run also the clients' local accuracy."""
    figure, axes = new_axes("accuracy, %")
    columns = ("accuracy", "local_accuracy") if len(runs) == 1 else ("accuracy",)
    _draw_columns(figure, axes, runs, columns, scale=100)
    return figure


@styled
def loss_figure(runs: Sequence[LoadedRun]) -> Figure:
    """Draw test loss over rounds; for a single run also the clients' training loss."""
    figure, axes = new_axes("loss")
    _draw_columns(figure, axes, runs, ("loss", "train_loss") if len(runs) == 1 else ("loss",), scale=1)
    return figure


@styled
def gamma_min_figure(runs: Sequence[LoadedRun]) -> Figure:
    """Draw Gamma_min over rounds, from 0 to the cohort's size; rounds at 0 are marked."""
    figure, axes = new_axes("least coverage Γmin, clients")
    lines = []
    for index, run in enumerate(runs):
        rounds, values = measured(run, "gamma_min")
        lines.append(draw_line(axes, rounds, values, index, step=True))
        uncovered = [index for index, value in zip(rounds, values, strict=True) if value == 0]
        if uncovered:
            axes.plot(uncovered, [0] * len(uncovered), "o", markersize=3.5, color=WARN, clip_on=False, zorder=3)
    cohort = max(len(record.cohort) for run in runs for record in run.history)
    axes.axhline(cohort, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    axes.set_ylim(0, max(cohort, 1) * 1.12)
    axes.yaxis.set_major_locator(whole_numbers())
    _fit(axes, runs)
    note = axes.text(0.005, 1.02 * cohort, f"all {cohort} clients", transform=axes.get_yaxis_transform(), color=MUTED)
    note.set(fontsize=9, in_layout=False)
    if len(runs) > 1:
        name_lines(figure, axes, lines, [run.name for run in runs])
    return figure


@styled
def pruning_noise_figure(runs: Sequence[LoadedRun]) -> Figure:
    """Draw delta^2 over rounds: the cohort's mean as a line, its range as a band, and for one run each client."""
    figure, axes = new_axes("pruning noise δ²")
    lines, top = [], 0.0
    for index, run in enumerate(runs):
        rounds, means = measured(run, "pruning_noise")
        spans = [(r.round, min(r.pruning_noises), max(r.pruning_noises)) for r in run.history if r.pruning_noises]
        indices, low, high = ([span[part] for span in spans] for part in range(3))
        if len(runs) <= 4:
            axes.fill_between(indices, low, high, color=colour(index), alpha=0.13, linewidth=0)
        if len(runs) == 1:
            _draw_clients(axes, run)
        lines.append(draw_line(axes, rounds, means, index))
        top = max([top, *filter(math.isfinite, [*means, *high])])
    axes.set_ylim(0, 1.08 * top or 1)
    _fit(axes, runs)
    if len(runs) > 1:
        name_lines(figure, axes, lines, [run.name for run in runs])
    return figure


@styled
def accuracy_by_megabytes_figure(runs: Sequence[LoadedRun]) -> Figure:
    """Draw test accuracy against the megabytes sent so far, down and up."""
    figure, axes = new_axes("accuracy, %", x="megabytes sent so far, down and up")
    lines, names = [], []
    for index, run in enumerate(runs):
        sent = accumulate(record.bytes_down + record.bytes_up for record in run.history)
        megabytes = {record.round: total / 1e6 for record, total in zip(run.history, sent, strict=True)}
        rounds, values = measured(run, "accuracy")
        if rounds:
            lines.append(draw_line(axes, [megabytes[r] for r in rounds], [100 * value for value in values], index))
            names.append(run.name)
    _cap_percent(axes)
    axes.margins(x=0)
    axes.set_xlim(left=0)
    if lines:
        name_lines(figure, axes, lines, names)
    return figure


def _draw_columns(figure: Figure, axes: Axes, runs: Sequence[LoadedRun], columns: Sequence[str], scale: float) -> None:
    """Draw one curve per run, or for one run one per column; leave out curves without values."""
    titles = {"accuracy": "global model", "local_accuracy": "local", "loss": "test", "train_loss": "training"}
    lines: list[Line2D] = []
    names: list[str] = []
    for run_index, run in enumerate(runs):
        for column_index, column in enumerate(columns):
            rounds, values = measured(run, column)
            if rounds:
                lines.append(draw_line(axes, rounds, [scale * value for value in values], run_index + column_index))
                names.append(run.name if len(runs) > 1 else titles[column])
    if scale == 100:
        _cap_percent(axes)
    elif lines and axes.get_ylim()[0] < 0.35 * axes.get_ylim()[1]:
        axes.set_ylim(bottom=0)
    _fit(axes, runs)
    if lines:
        name_lines(figure, axes, lines, names)


def _draw_clients(axes: Axes, run: LoadedRun) -> None:
    """Draw one point per client and round, or an even sample of them if there are too many."""
    points = [(record.round, noise) for record in run.history for noise in record.pruning_noises]
    step = max(-(-len(points) // MOST_POINTS), 1)
    while math.gcd(step, len(run.history.last.cohort)) > 1:  # otherwise the sample would always hit the same slots
        step += 1
    if points:
        axes.plot(*zip(*points[::step], strict=True), "o", markersize=2, markeredgewidth=0, color=MUTED, alpha=0.6)


def _fit(axes: Axes, runs: Sequence[LoadedRun]) -> None:
    fit_rounds(axes, [record.round for run in runs for record in (run.history[0], run.history.last)])


def _cap_percent(axes: Axes) -> None:
    """Limit the y axis to 0 to 100, and keep it so wide that noise does not look like a trend."""
    low, high = axes.get_ylim()
    if high - low < 1:
        low, high = (low + high) / 2 - 0.5, (low + high) / 2 + 0.5
    axes.set_ylim(max(low, 0), min(high, 100.5))
