"""The paper's figures, drawn from our own runs: which there are, what they are called and what they show."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fedcover.report import format as cells
from fedcover.report.figures import Drawing
from fedcover_experiments.paper.curves import FULL_LOOK, MOST_BANDS, Column, Curve, curves_figure, look_of, look_of_row
from fedcover_experiments.paper.experiments import experiments
from fedcover_experiments.paper.illustrations import DESIGNS, designs_figure, region_coverage, techniques_figure
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import Results
from fedcover_experiments.runner import (
    DATA,
    FULL,
    LARGE,
    MEDIUM,
    SMALL,
    STAR_MEDIUM,
    STAR_SMALL,
    Experiment,
)

TECHNIQUES = {
    "WP": "weights pruning",
    "NP": "neuron pruning",
    "FS": "a fixed sub-network",
    "PT": "a pre-trained mask",
}
APPENDIX = {
    ("mnist", "iid"): ("WP", "FS", "NP", "PT"),
    ("mnist", "non-iid"): ("WP", "NP", "FS", "PT"),
    ("cifar10", "iid"): ("WP", "PT", "FS"),
}
"""The techniques whose curves the appendix shows, in its order."""
COLUMNS: dict[Column, str] = {"loss": "test loss", "accuracy": "test accuracy"}
MOST_IN_WORDS = 7
"""With more curves than this, only their range is told in words."""

_COVERAGE = "at equal cost the code with the higher Γmin ends better, and more clearly so with non-IID data"
CLAIMS = {
    "WP": _COVERAGE,
    "NP": _COVERAGE,
    "FS": "a fixed sub-network has a relatively low sensitivity towards high pruning levels",
    "PT": "static masks converge to a higher loss than masks that adapt, and PT is not found competitive",
}


@dataclass(frozen=True)
class Plan:
    """A figure of curves before the results are looked up: its rows with their looks, and what to say of it."""

    name: str
    title: str
    rows: Sequence[tuple[Experiment, int]]
    look: str
    """What to look at."""
    claim: str
    """What the paper says of it."""
    column: Column = "loss"
    by_code: bool = False
    """Whether rows go by their codes, as in the appendix, rather than by their nicknames."""


def drawings(results: Results) -> list[Drawing]:
    """The paper's figures in its order; rows without data are left out, and so are figures of which none but full
    models would be left."""
    return [_figure_1(), *_drawn(_figure_2(), results), _techniques(), *_drawn(_appendix(), results)]


def _figure_1() -> Drawing:
    least = ", ".join(f"{min(region_coverage(code))} with {code}" for code in DESIGNS)
    return Drawing(
        "figure-1",
        "Figure 1: three designs of equal cost",
        "Which of ten clients hold which regions, from S1 (the largest weights) to S4 (the smallest), and below how "
        "many hold each; the cost is the mean number of multiply-adds as a share of the full model's. "
        "Look at the least number, Γmin. The paper: existing methods always discard what is below the threshold (a), "
        "other partitions raise Γmin (b, c), and the costs are nearly identical.",
        f"Three grids of clients by regions; the least coverage is {least}",
        designs_figure,
    )


def _techniques() -> Drawing:
    return Drawing(
        "techniques",
        "Pruning techniques",
        "What the policies keep of a small network at keep 0.75: a row is a hidden neuron with its incoming and "
        "outgoing weights, and the larger a square the larger the weight. WP cuts the smallest weights, NP the "
        "neurons with the smallest incoming weights, FS the last neurons. PT draws WP's mask anew in each of the "
        "first 3 rounds and then keeps it, whatever becomes of the weights.",
        "Grids of squares: WP cuts scattered weights, NP and FS whole rows, and PT's mask stays after round 3",
        techniques_figure,
    )


def _figure_2() -> Iterator[Plan]:
    """Figure 2, all of it on MNIST: (a) to (d) IID, (e) and (f) not."""
    techniques = [("full", FULL, FULL_LOOK), *((name, LARGE, look_of_row(n)) for n, name in enumerate(TECHNIQUES))]
    levels = [("full", FULL, FULL_LOOK)]
    for shade, name in enumerate(("WP", "NP", "FS")):
        levels += [(name, code, look_of(shade, dash)) for dash, code in enumerate((LARGE, MEDIUM, SMALL))]
    coverage = [
        ("full", FULL, FULL_LOOK),
        *(("WP", code, look_of(0, dash)) for dash, code in enumerate((STAR_MEDIUM, MEDIUM))),
        *(("NP", code, look_of(1, dash)) for dash, code in enumerate((STAR_MEDIUM, MEDIUM))),
    ]
    high = [("WP", code, look_of(3, dash)) for dash, code in enumerate((STAR_SMALL, SMALL))]
    slow = "at a similar pruning level PT converges a lot slower than the others"
    lower = "a higher Γmin reaches a lower loss with both techniques, at no extra cost"
    pairs = f"*WP-M1 ({STAR_MEDIUM}) with WP-M2 ({MEDIUM}), and *NP-M1 with NP-M2"
    at_l = f"Full models and the four techniques at level L ({LARGE})"
    yield _panel("a", "pruning techniques", "iid", techniques, f"{at_l}: look for one that falls behind", slow)
    yield _panel(
        "b", "pruning level", "iid", levels,
        f"Three techniques, each at levels L ({LARGE}), M ({MEDIUM}) and S ({SMALL}): look at how far each moves with "
        "the level",
        "generally a higher pruning level leads to a higher loss",
    )  # fmt: skip
    yield _panel("c", "impact of Γmin", "iid", coverage, f"Compare {pairs}: the same cost, Γmin 8 against 4", lower)
    fixed = [(e.technique, e.code) for e in experiments("mnist-fs") if e.split == "iid"]
    yield _panel(
        "d", "mask error", "iid", [(name, code, _look(name, n)) for n, (name, code) in enumerate(fixed)],
        "A fixed sub-network at rising pruning levels: look at the order of the curves",
        "the error that pruning introduces is another key factor, and more of it gives a higher loss",
        by_code=True,
    )  # fmt: skip
    yield _panel("e", "pruning techniques", "non-iid", techniques, f"{at_l}: look for one that falls behind",
                 "findings are similar with heterogeneous data")  # fmt: skip
    yield _panel(
        "f", "impact of Γmin", "non-iid", [*coverage, *high],
        f"Compare {pairs}, and at level S *WP-S1 ({STAR_SMALL}) with WP-S2 ({SMALL})",
        "findings are similar with heterogeneous data, and weights pruning gets unsteady at the high level",
    )  # fmt: skip


def _panel(
    letter: str, title: str, split: str, rows: Iterable[tuple[str, str, int]], look: str, claim: str,
    by_code: bool = False,
) -> Plan:  # fmt: skip
    made = [(Experiment("mnist", split, technique, code), style) for technique, code, style in rows]
    where = Experiment("mnist", split, "", "").place
    return Plan(f"figure-2{letter}", f"Figure 2{letter}: {title}, {where}", made, look, claim, by_code=by_code)


def _appendix() -> Iterator[Plan]:
    """Loss and accuracy of every code of a technique, with full models as the reference."""
    look: dict[Column, str] = {
        "loss": "look for rows that end above FullNets, and for a loss that turns up again",
        "accuracy": "look for rows that end below FullNets",
    }
    for (data, split), techniques in APPENDIX.items():
        for technique in techniques:
            key = f"{data.removesuffix('10')}-{technique.lower()}"
            found = [experiment for experiment in experiments(key) if experiment.split == split]
            rows = [(experiment, _look(experiment.technique, n)) for n, experiment in enumerate(found)]
            what = TECHNIQUES[technique]
            for column, measure in COLUMNS.items():
                yield Plan(
                    f"{data}-{split}-{technique.lower()}-{column}",
                    f"{what.removeprefix('a ').capitalize()}, {Experiment(data, split, '', '').place}: {measure}",
                    rows,
                    f"Every code with {what}: {look[column]}",
                    CLAIMS[technique],
                    column,
                    by_code=True,
                )


def _look(technique: str, place: int) -> int:
    """The look of a row by its place in a table, of which full models are the first."""
    return FULL_LOOK if technique == "full" else look_of_row(place - 1)


def _drawn(plans: Iterable[Plan], results: Results) -> Iterator[Drawing]:
    """The plans that there is data for, with their words."""
    for plan in plans:
        rows = [(experiment, look) for experiment, look in plan.rows if results.of(experiment)]
        curves = [Curve(_name(row, plan.by_code), look, tuple(results.of(row))) for row, look in rows]
        curves = [curve for curve in curves if curve.points(plan.column).rounds]
        if not all(curve.full for curve in curves):
            caption = f"{plan.look}. The paper: {plan.claim}. {_how_made(plan, curves, results)}."
            alt = f"Line chart of {COLUMNS[plan.column]} over rounds; at the end {_ends(curves, plan.column)}"
            yield Drawing(plan.name, plan.title, caption, alt, partial(curves_figure, curves, plan.column))


def _name(experiment: Experiment, by_code: bool) -> str:
    """The paper's nickname such as *WP-M1, or the code."""
    rows = tables()["table1" if experiment.data == "mnist" else "table2"].rows
    names = {(row.technique, row.code): row.name for row in rows}
    if by_code and experiment.technique != "full":
        return experiment.code
    return names.get((experiment.technique, experiment.code), f"{experiment.technique} {experiment.code}")


def _how_made(plan: Plan, curves: Sequence[Curve], results: Results) -> str:
    """How many seeds and rounds a figure stands for, what its parts are, and on what data."""
    counts = sorted({len(curve.outcomes) for curve in curves})
    seeds = " to ".join(f"{count}" for count in (counts if len(counts) == 1 else (counts[0], counts[-1])))
    parts = [
        f"Mean over {seeds} seed{'' if seeds == '1' else 's'} of {results.rounds} round{'s'[: results.rounds > 1]}"
    ]
    if len(curves) <= MOST_BANDS and counts[-1] > 1:
        parts.append("bands of one standard deviation")
    if len(curves) > 1 and any(curve.full for curve in curves):
        parts.append("below, the difference from FullNets seed by seed")
    data = plan.rows[0][0].data
    copies = dict.fromkeys(facts["data"][data] for facts in results.made if data in facts.get("data", {}))
    return "; ".join([*parts, f"data: {DATA[data]}, {' and '.join(copies) or 'of a copy that was not recorded'}"])


def _ends(curves: Sequence[Curve], column: Column) -> str:
    """The curves' last values in words; of many curves their range."""
    ends = {curve.name: float(curve.points(column).mean[-1]) for curve in curves}
    words = {name: cells.decimal(end) if column == "loss" else cells.percent(end / 100) for name, end in ends.items()}
    if len(ends) <= MOST_IN_WORDS:
        return ", ".join(f"{name} {text}" for name, text in words.items())
    low, high = min(ends, key=lambda name: ends[name]), max(ends, key=lambda name: ends[name])
    full = f", FullNets {words['FullNets']}" if {"FullNets"} <= {*ends} - {low, high} else ""
    return f"from {words[low]} ({low}) to {words[high]} ({high}){full}"
