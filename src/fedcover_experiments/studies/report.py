"""What a study says: every technique against the study's base, paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcover.report.format import mean_and_deviation, signed
from fedcover.report.style import MUTED, WIDTH, add_legend, colour, styled
from fedcover_experiments.measures import late_accuracy
from fedcover_experiments.results import Results
from fedcover_experiments.runner import Experiment
from fedcover_experiments.statistics import Difference, holm, paired
from fedcover_experiments.studies import Study

LEVEL = 0.05


@dataclass(frozen=True)
class Cell:
    """One technique at one budget: its accuracy over the last rounds by seed, and how much more than the base's."""

    experiment: Experiment
    accuracies: tuple[float, ...]
    gamma_min: int
    noise: float
    gain: Difference | None
    p: float = 1.0
    """After Holm's correction over the comparisons on the same data."""


def cells(study: Study, results: Results, place: str) -> list[Cell]:
    """The cells of one place, such as MNIST IID, in the study's order; what was not run is left out."""
    found = []
    for experiment in study.experiments():
        outcomes = results.of(experiment)
        if experiment.place != place or not outcomes:
            continue
        ours = {outcome.seed: late_accuracy(outcome) for outcome in outcomes}
        base = {o.seed: late_accuracy(o) for o in results.of(_base_of(study, experiment))}
        seeds = sorted(ours.keys() & base.keys()) if experiment.technique != study.base else []
        gain = paired([ours[seed] for seed in seeds], [base[seed] for seed in seeds]) if len(seeds) > 1 else None
        least, noise = min(o.gamma_min for o in outcomes), fmean(o.pruning_noise for o in outcomes)
        found.append(Cell(experiment, tuple(ours.values()), least, noise, gain))
    raised = iter(holm([cell.gain.p for cell in found if cell.gain]))
    return [replace(cell, p=next(raised)) if cell.gain else cell for cell in found]


def _base_of(study: Study, experiment: Experiment) -> Experiment:
    """What an experiment is compared with: the base with the same code, or, across codes, the base on the same data."""
    if not study.apart:
        return replace(experiment, technique=study.base)
    return next(e for e in study.experiments() if e.technique == study.base and e.place == experiment.place)


def places(study: Study, results: Results) -> list[str]:
    """The data and splits that there are results for."""
    return list(dict.fromkeys(e.place for e in study.experiments() if results.of(e)))


def rows(study: Study, results: Results, place: str) -> list[dict[str, str]]:
    """A table of one place; gains that are no accident are bold. A column in which there is nothing is left out."""
    made = [_row(study, results, cell) for cell in cells(study, results, place)]
    used = [head for head in made[0] if any(row[head] for row in made)] if made else []
    return [{head: row[head] for head in used} for row in made]


def _row(study: Study, results: Results, cell: Cell) -> dict[str, str]:
    gain = ""
    if cell.gain:
        gain = f"{signed(cell.gain.mean)} [{signed(cell.gain.low)}, {signed(cell.gain.high)}]"
        gain = f"**{gain}**" if cell.p < LEVEL else gain
    budgets, masks = {"budgets": study.budgets[cell.experiment.code]}, {"masks": cell.experiment.technique}
    return {
        **(masks | budgets if study.apart else budgets | masks),
        "Γmin": f"{cell.gamma_min}",
        "mean δ²": f"{cell.noise:.3f}",
        "accuracy, %": mean_and_deviation(cell.accuracies),
        f"more than {study.base} [95 %]": gain,
        "p (Holm)": f"{cell.p:.4f}" if cell.gain else "",
        **(_costs(results, cell.experiment) if study.apart else {}),
    }


def _costs(results: Results, experiment: Experiment) -> dict[str, str]:
    """What a technique leaves uncovered and what it takes: per client and round, and seconds of a round."""
    outcomes = results.of(experiment)
    uncovered, macs, local = ([getattr(o, key) for o in outcomes] for key in ("uncovered", "macs", "local_accuracy"))
    down, up = (fmean(getattr(o, key) for o in outcomes) for key in ("bytes_down", "bytes_up"))
    seconds = [
        facts["round_seconds"]
        for facts in results.made
        if facts.get("technique") == experiment.technique and list(facts["data"]) == [experiment.data]
    ]
    return {
        "local, %": f"{100 * fmean(local):.2f}" if None not in local else "",
        "uncovered": f"{fmean(uncovered):.1%}" if None not in uncovered else "",
        "MACs": f"{fmean(macs):.2f}" if None not in macs else "",
        "MB down": f"{down / 1e6:.2f}",
        "MB up": f"{up / 1e6:.2f}",
        "s a round": f"{fmean(seconds):.3f}" if seconds else "",
    }


def tally(study: Study, results: Results, part: str) -> list[dict[str, str]]:
    """In how many settings of a part each technique is better or worse, beyond accident, than the two bases.

    Each count is one claim, and Holm's correction is over its settings. Settings in which both chose the same masks
    are not counted.
    """
    shown: dict[str, dict[str, str]] = {}
    for base in (study.base, study.also):
        against = replace(study, base=base)
        gains: dict[str, list[Difference]] = {}
        for cell in (cell for place in places(study, results) for cell in cells(against, results, place)):
            if cell.gain and cell.experiment.code in study.parts[part] and (cell.gain.low, cell.gain.high) != (0, 0):
                gains.setdefault(cell.experiment.technique, []).append(cell.gain)
        for kind, found in gains.items():
            if kind == study.base:
                continue  # against the second base it would be the same comparison again
            pairs = zip(found, holm([gain.p for gain in found]), strict=True)
            sure = [gain.mean for gain, p in pairs if p < LEVEL]
            text = f"{sum(g > 0 for g in sure)} better, {sum(g < 0 for g in sure)} worse of {len(found)}"
            shown.setdefault(kind, {})[f"than {base}"] = text
    heads = (f"than {study.base}", f"than {study.also}")
    return [{"masks": kind, **{head: texts.get(head, "") for head in heads}} for kind, texts in shown.items()]


@styled
def figure_of(study: Study, results: Results) -> Figure:
    """For each place the gain over the base with its 95 % interval; or, where each technique is run by itself, the
    accuracy of each, a dot for every seed."""
    panels = places(study, results)
    found = [cells(study, results, place) for place in panels]
    if study.apart:
        return _accuracies(study, dict(zip(panels, found, strict=True)))
    kinds = [k for k in dict.fromkeys(e.technique for e in study.experiments()) if k not in ("full", study.base)]
    compared = {cell.experiment.code for some in found for cell in some if cell.gain}
    codes = [code for code in study.budgets if code in compared]
    height = 0.5 + 0.3 * len(codes)
    figure = Figure(figsize=(WIDTH, 0.4 + height * len(panels)), layout="constrained")
    for axes, place, some in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, found, strict=True):
        _draw(axes, some, kinds, codes)
        axes.set_title(f"{place}: points of accuracy more than {study.base}")
    handles = [figure.axes[0].plot([], [], "o-", color=colour(index))[0] for index in range(len(kinds))]
    add_legend(figure, handles, kinds)
    return figure


def _accuracies(study: Study, found: Mapping[str, Sequence[Cell]]) -> Figure:
    """A panel for each place, the best technique first; a line at the base."""
    heights = [0.6 + 0.2 * len(some) for some in found.values()]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    panels = figure.subplots(len(found), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (place, some) in zip(panels, found.items(), strict=True):
        best = sorted(some, key=lambda cell: -fmean(cell.accuracies))
        for y, cell in enumerate(best):
            ours = cell.experiment.technique == study.base
            axes.plot(cell.accuracies, [y] * len(cell.accuracies), "o", markersize=4, color=colour(0 if ours else 5))
            if ours:
                axes.axvline(fmean(cell.accuracies), color=MUTED, linewidth=0.8)
        axes.set_yticks(range(len(best)), [cell.experiment.technique for cell in best])
        axes.set_ylim(len(best) - 0.4, -0.6)
        axes.set_title(f"{place}: accuracy over the last rounds, %")
    return figure


def _draw(axes: Axes, found: Sequence[Cell], kinds: Sequence[str], codes: Sequence[str]) -> None:
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for cell in found:
        if cell.gain:
            index = kinds.index(cell.experiment.technique)
            y = codes.index(cell.experiment.code) + 0.16 * (index - (len(kinds) - 1) / 2)
            axes.plot([cell.gain.low, cell.gain.high], [y, y], "-", color=colour(index))
            axes.plot([cell.gain.mean], [y], "o", markersize=4, color=colour(index))
    axes.set_yticks(range(len(codes)), codes)
    axes.set_ylim(len(codes) - 0.4, -0.6)
