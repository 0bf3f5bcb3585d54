"""The figure of a study: gains over its base, or the accuracy of every policy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcover.report.style import MUTED, WIDTH, add_legend, colour, styled
from fedcover_experiments.results import Results
from fedcover_experiments.runner import Experiment
from fedcover_experiments.studies.registry import Study
from fedcover_experiments.studies.report import Cell, cells, data_titles


@styled
def study_figure(study: Study, results: Results) -> Figure:
    """Draw one panel per data set and split: gains over the base, or accuracies if codes differ."""
    panels = {title: cells(study, results, title) for title in data_titles(study, results)}
    return _accuracies(study, panels) if study.across_codes else _gains(study, panels)


def _gains(study: Study, panels: Mapping[str, Sequence[Cell]]) -> Figure:
    """Draw the gain over the base with its 95 % interval."""
    policies = [p for p in dict.fromkeys(e.policy for e in study.experiments()) if p not in ("full", study.base)]
    compared = {cell.experiment.code for row in panels.values() for cell in row if cell.gain}
    codes = [code for code in study.budgets if code in compared]
    height = 0.75 + 0.3 * len(codes)
    figure = Figure(figsize=(WIDTH, 0.4 + height * len(panels)), layout="constrained")
    subplots = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, (title, row) in zip(subplots, panels.items(), strict=True):
        _draw_gains(axes, row, policies, codes)
        axes.set_title(f"{title}:\ngain over {study.base}, points")
    handles = [figure.axes[0].plot([], [], "o-", color=colour(index))[0] for index in range(len(policies))]
    add_legend(figure, handles, policies)
    return figure


def _draw_gains(axes: Axes, row: Sequence[Cell], policies: Sequence[str], codes: Sequence[str]) -> None:
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for cell in row:
        if cell.gain:
            index = policies.index(cell.experiment.policy)
            y = codes.index(cell.experiment.code) + 0.16 * (index - (len(policies) - 1) / 2)
            axes.plot([cell.gain.low, cell.gain.high], [y, y], "-", color=colour(index))
            axes.plot([cell.gain.mean], [y], "o", markersize=4, color=colour(index))
    axes.set_yticks(range(len(codes)), codes)
    axes.set_ylim(len(codes) - 0.4, -0.6)


def _accuracies(study: Study, panels: Mapping[str, Sequence[Cell]]) -> Figure:
    """Draw a dot for every seed, the best policy first, and a line at the base."""
    heights = [0.85 + 0.2 * len(row) for row in panels.values()]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    subplots = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (title, row) in zip(subplots, panels.items(), strict=True):
        best = sorted(row, key=lambda cell: -fmean(cell.accuracies))
        for y, cell in enumerate(best):
            is_base = cell.experiment.policy == study.base
            shade = colour(0 if is_base else 5)
            axes.plot(cell.accuracies, [y] * len(cell.accuracies), "o", markersize=4, color=shade)
            if is_base:
                axes.axvline(fmean(cell.accuracies), color=MUTED, linewidth=0.8)
        axes.set_yticks(range(len(best)), _labels([cell.experiment for cell in best]))
        axes.set_ylim(len(best) - 0.4, -0.6)
        axes.set_title(f"{title}:\nlate accuracy, %")
    return figure


def _labels(experiments: Sequence[Experiment]) -> list[str]:
    """Return the policies, with their codes where a policy has several.

    >>> _labels([Experiment("mnist", "iid", *of) for of in (("WP", "10x1"), ("WP", "10x0.5"), ("FS", "10x1"))])
    ['WP, 10x1', 'WP, 10x0.5', 'FS']
    """
    counts = Counter(experiment.policy for experiment in experiments)
    return [f"{e.policy}, {e.code}" if counts[e.policy] > 1 else e.policy for e in experiments]
