"""What the study of coverage says: every way to make masks against nested masks, paired by seed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcover.paired import Difference, holm, paired
from fedcover.paper.claims import late_accuracy
from fedcover.paper.compare import signed
from fedcover.paper.experiments import Experiment
from fedcover.paper.results import Outcome, Results
from fedcover.report.style import MUTED, WIDTH, add_legend, colour, styled
from fedcover.study.coverage import BUDGETS, DATA, KINDS, SPLITS, WHOLE

BASE = "nested"
LEVEL = 0.05


@dataclass(frozen=True)
class Cell:
    """One way to make masks at one budget: its accuracy over the last rounds, and how much more than nested masks."""

    experiment: Experiment
    mean: float
    deviation: float
    gamma_min: int
    noise: float
    gain: Difference | None
    p: float = 1.0
    """After Holm's correction over the split's comparisons."""

    @property
    def told(self) -> str:
        """The gain as text, in bold type where it is no accident."""
        if self.gain is None:
            return ""
        text = f"{signed(self.gain.mean)} [{signed(self.gain.low)}, {signed(self.gain.high)}]"
        return f"**{text}**" if self.p < LEVEL else text


def cells(results: Results, data: str, split: str) -> list[Cell]:
    """The cells of one split, full models first; what was not run is left out."""
    found = []
    for kind, code in (("full", WHOLE), *((kind, code) for code in BUDGETS for kind in KINDS)):
        experiment = Experiment(data, split, kind, code)
        outcomes = results.of(experiment)
        if outcomes:
            base = results.of(Experiment(data, split, BASE, code)) if kind not in ("full", BASE) else []
            found.append(_cell(experiment, outcomes, base))
    gains = [cell for cell in found if cell.gain]
    raised = dict(zip((c.experiment for c in gains), holm([c.gain.p for c in gains if c.gain]), strict=True))
    return [replace(cell, p=raised.get(cell.experiment, 1.0)) for cell in found]


def _cell(experiment: Experiment, outcomes: Sequence[Outcome], base: Sequence[Outcome]) -> Cell:
    values = {outcome.seed: late_accuracy(outcome) for outcome in outcomes}
    others = {outcome.seed: late_accuracy(outcome) for outcome in base}
    seeds = sorted(values.keys() & others.keys())
    gain = paired([values[seed] for seed in seeds], [others[seed] for seed in seeds]) if len(seeds) > 1 else None
    deviation = stdev(values.values()) if len(values) > 1 else 0.0
    least, noise = min(o.gamma_min for o in outcomes), fmean(o.pruning_noise for o in outcomes)
    return Cell(experiment, fmean(values.values()), deviation, least, noise, gain)


def rows(results: Results, data: str, split: str) -> list[dict[str, str]]:
    """A table of one split: a row for each budget and way to make masks."""
    return [
        {
            "budgets": BUDGETS.get(cell.experiment.code, "full models"),
            "masks": cell.experiment.technique,
            "Γmin": f"{cell.gamma_min}",
            "mean δ²": f"{cell.noise:.3f}",
            "accuracy, %": f"{cell.mean:.2f} ± {cell.deviation:.2f}",
            "more than nested": cell.told,
        }
        for cell in cells(results, data, split)
    ]


@styled
def gains_figure(results: Results) -> Figure:
    """For each data set and split the gain over nested masks, with its 95 % interval."""
    panels = [(data, split) for data in DATA for split in SPLITS if cells(results, data, split)]
    figure = Figure(figsize=(WIDTH, 0.6 + 2.1 * len(panels)), layout="constrained")
    kinds = [kind for kind in KINDS if kind != BASE]
    for axes, (data, split) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        _draw(axes, cells(results, data, split), kinds)
        axes.set_title(f"{data} {split}: points of accuracy more than nested masks")
    handles = [figure.axes[0].plot([], [], "o-", color=colour(index))[0] for index in range(len(kinds))]
    add_legend(figure, handles, kinds)
    return figure


def _draw(axes: Axes, found: Sequence[Cell], kinds: Sequence[str]) -> None:
    codes = list(BUDGETS)
    axes.axvline(0, color=MUTED, linewidth=0.8)
    for cell in found:
        if cell.gain:
            index = kinds.index(cell.experiment.technique)
            y = codes.index(cell.experiment.code) + 0.16 * (index - (len(kinds) - 1) / 2)
            axes.plot([cell.gain.low, cell.gain.high], [y, y], "-", color=colour(index))
            axes.plot([cell.gain.mean], [y], "o", markersize=4, color=colour(index))
    axes.set_yticks(range(len(codes)), codes)
    axes.set_ylim(len(codes) - 0.4, -0.6)
