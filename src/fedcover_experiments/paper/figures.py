"""The paper's figures, drawn from our own runs: their names, titles, rows and captions."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from fedcover.report import format as cells
from fedcover.report.figures import Drawing, LegendEntry
from fedcover_experiments.paper.curves import (
    FULL_STYLE,
    MOST_BANDS,
    Column,
    Curve,
    curves_figure,
    style_of,
    style_of_row,
)
from fedcover_experiments.paper.experiments import experiments
from fedcover_experiments.paper.illustrations import DESIGNS, designs_figure, policies_figure, region_coverage
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

POLICY_TITLES = {
    "WP": "weight pruning",
    "NP": "neuron pruning",
    "FS": "a fixed sub-network",
    "PT": "a pre-trained mask",
}
APPENDIX = {
    ("mnist", "iid"): ("WP", "FS", "NP", "PT"),
    ("mnist", "non-iid"): ("WP", "NP", "FS", "PT"),
    ("cifar10", "iid"): ("WP", "PT", "FS"),
}
"""The policies whose curves the appendix shows, in its order."""
COLUMNS: dict[Column, str] = {"loss": "test loss", "accuracy": "test accuracy"}
MOST_IN_WORDS = 7
"""The largest number of curves whose ends the alternative text lists; for more it gives the range."""

_COVERAGE = "at equal cost, the code with the higher Γmin ends better, and more clearly so with non-IID data"
CLAIMS = {
    "WP": _COVERAGE,
    "NP": _COVERAGE,
    "FS": "a fixed sub-network is less sensitive to high pruning levels",
    "PT": "static masks converge to a higher loss than adaptive masks, and PT is not competitive",
}


@dataclass(frozen=True)
class Plan:
    """A figure of curves before the results are looked up: its rows with their styles, and its caption."""

    name: str
    title: str
    rows: Sequence[tuple[Experiment, int]]
    hint: str
    """What to look at."""
    claim: str
    """The paper's claim about the figure."""
    column: Column = "loss"
    by_code: bool = False
    """True if rows are named by their codes, as in the appendix, not by their nicknames."""


def drawings(results: Results) -> list[Drawing]:
    """Return the paper's figures in its order; rows without data, and figures with only full models, are left out."""
    return [_figure_1(), *_drawn(_figure_2(), results), _policies(), *_drawn(_appendix(), results)]


def _figure_1() -> Drawing:
    least = ", ".join(f"{min(region_coverage(code))} with {code}" for code in DESIGNS)
    return Drawing(
        "figure-1",
        "Figure 1: three designs of equal cost",
        "The regions that each of ten clients holds, from S1 (the largest weights) to S4 (the smallest), and below the "
        "number of clients that hold each region. The cost is the mean number of multiply-adds as a share of the full "
        "model's. Look at the smallest number, Γmin. The paper: existing methods always discard the weights below the "
        "threshold (a), other partitions raise Γmin (b, c), and the costs are nearly identical.",
        f"Three grids of clients by regions; the least coverage is {least}",
        designs_figure,
    )


def _policies() -> Drawing:
    return Drawing(
        "policies",
        "Pruning policies",
        "The weights that the policies keep of a small model at keep 0.75. A row is a hidden neuron with its incoming "
        "and outgoing weights; a larger square is a larger weight. WP removes the smallest weights, NP the neurons "
        "with the smallest incoming weights, FS the last neurons. PT computes WP's mask again in each of the first 3 "
        "rounds and then keeps it, however the weights change.",
        "Grids of squares: WP removes scattered weights, NP and FS whole rows, and PT's mask is fixed after round 3",
        policies_figure,
    )


def _figure_2() -> Iterator[Plan]:
    """Yield the panels of Figure 2, all on MNIST: (a) to (d) IID, (e) and (f) non-IID."""
    policies = [("full", FULL, FULL_STYLE), *((name, LARGE, style_of_row(n)) for n, name in enumerate(POLICY_TITLES))]
    levels = [("full", FULL, FULL_STYLE)]
    for shade, name in enumerate(("WP", "NP", "FS")):
        levels += [(name, code, style_of(shade, dash)) for dash, code in enumerate((LARGE, MEDIUM, SMALL))]
    coverage = [
        ("full", FULL, FULL_STYLE),
        *(("WP", code, style_of(0, dash)) for dash, code in enumerate((STAR_MEDIUM, MEDIUM))),
        *(("NP", code, style_of(1, dash)) for dash, code in enumerate((STAR_MEDIUM, MEDIUM))),
    ]
    high = [("WP", code, style_of(3, dash)) for dash, code in enumerate((STAR_SMALL, SMALL))]
    slow = "at a similar pruning level, PT converges much more slowly than the others"
    lower = "with both policies a higher Γmin leads to a lower loss, at no extra cost"
    pairs = f"*WP-M1 ({STAR_MEDIUM}) with WP-M2 ({MEDIUM}), and *NP-M1 with NP-M2"
    at_l = f"Full models and the four policies at level L ({LARGE})"
    yield _panel("a", "pruning policies", "iid", policies, f"{at_l}: look for a curve that falls behind", slow)
    yield _panel(
        "b", "pruning level", "iid", levels,
        f"Three policies, each at levels L ({LARGE}), M ({MEDIUM}) and S ({SMALL}): look at how much each changes with "
        "the level",
        "in general, a higher pruning level leads to a higher loss",
    )  # fmt: skip
    yield _panel("c", "impact of Γmin", "iid", coverage, f"Compare {pairs}: equal cost, Γmin 8 and 4", lower)
    fixed = [(e.policy, e.code) for e in experiments("mnist-fs") if e.split == "iid"]
    yield _panel(
        "d", "mask error", "iid", [(name, code, _style_in_table(name, n)) for n, (name, code) in enumerate(fixed)],
        "A fixed sub-network at rising pruning levels: look at the order of the curves",
        "the error that pruning introduces is another key factor, and a larger error gives a higher loss",
        by_code=True,
    )  # fmt: skip
    yield _panel("e", "pruning policies", "non-iid", policies, f"{at_l}: look for a curve that falls behind",
                 "the findings are similar with heterogeneous data")  # fmt: skip
    yield _panel(
        "f", "impact of Γmin", "non-iid", [*coverage, *high],
        f"Compare {pairs}, and at level S *WP-S1 ({STAR_SMALL}) with WP-S2 ({SMALL})",
        "the findings are similar with heterogeneous data, and weight pruning becomes unsteady at the high level",
    )  # fmt: skip


def _panel(
    letter: str, title: str, split: str, rows: Iterable[tuple[str, str, int]], hint: str, claim: str,
    by_code: bool = False,
) -> Plan:  # fmt: skip
    styled = [(Experiment("mnist", split, policy, code), style) for policy, code, style in rows]
    data_title = Experiment("mnist", split, "", "").data_title
    return Plan(f"figure-2{letter}", f"Figure 2{letter}: {title}, {data_title}", styled, hint, claim, by_code=by_code)


def _appendix() -> Iterator[Plan]:
    """Yield loss and accuracy of every code of a policy, with full models as the reference."""
    hints: dict[Column, str] = {
        "loss": "look for rows that end above FullNets, and for a loss that rises again",
        "accuracy": "look for rows that end below FullNets",
    }
    for (data, split), policies in APPENDIX.items():
        for policy in policies:
            key = f"{data.removesuffix('10')}-{policy.lower()}"
            in_table = [experiment for experiment in experiments(key) if experiment.split == split]
            rows = [(experiment, _style_in_table(experiment.policy, n)) for n, experiment in enumerate(in_table)]
            title = POLICY_TITLES[policy]
            for column, measure in COLUMNS.items():
                yield Plan(
                    f"{data}-{split}-{policy.lower()}-{column}",
                    f"{title.removeprefix('a ').capitalize()}, {Experiment(data, split, '', '').data_title}: {measure}",
                    rows,
                    f"Every code with {title}: {hints[column]}",
                    CLAIMS[policy],
                    column,
                    by_code=True,
                )


def _style_in_table(policy: str, row: int) -> int:
    """Return the style of a row by its number in a table, whose first row is full models."""
    return FULL_STYLE if policy == "full" else style_of_row(row - 1)


def _drawn(plans: Iterable[Plan], results: Results) -> Iterator[Drawing]:
    """Yield the figures for which there are data, with their captions."""
    for plan in plans:
        rows = [(experiment, style) for experiment, style in plan.rows if results.of(experiment)]
        curves = [Curve(_name(row, plan.by_code), style, tuple(results.of(row))) for row, style in rows]
        curves = [curve for curve in curves if curve.points(plan.column).rounds]
        if not all(curve.full for curve in curves):
            caption = f"{plan.hint}. The paper: {plan.claim}. {_source(plan, curves, results)}."
            alt = f"Line chart of {COLUMNS[plan.column]} over rounds; at the end {_ends(curves, plan.column)}"
            legend = [LegendEntry(curve.name, curve.style, curve.label) for curve in curves]
            draw = partial(curves_figure, curves, plan.column)
            yield Drawing(plan.name, plan.title, caption, alt, draw, legend)


def _name(experiment: Experiment, by_code: bool) -> str:
    """Return the paper's nickname such as *WP-M1, or the code."""
    rows = tables()["table1" if experiment.data == "mnist" else "table2"].rows
    names = {(row.policy, row.code): row.name for row in rows}
    if by_code and experiment.policy != "full":
        return experiment.code
    return names.get((experiment.policy, experiment.code), f"{experiment.policy} {experiment.code}")


def _source(plan: Plan, curves: Sequence[Curve], results: Results) -> str:
    """Return the last sentence of a caption: seeds, rounds, panels and data."""
    counts = sorted({len(curve.outcomes) for curve in curves})
    seeds = " to ".join(f"{count}" for count in (counts if len(counts) == 1 else (counts[0], counts[-1])))
    parts = [
        f"Mean over {seeds} seed{'' if seeds == '1' else 's'} of {results.rounds} round{'s'[: results.rounds > 1]}"
    ]
    if len(curves) <= MOST_BANDS and counts[-1] > 1:
        parts.append("bands of one standard deviation")
    if len(curves) > 1 and any(curve.full for curve in curves):
        parts.append("below, the difference from FullNets, paired by seed")
    data = plan.rows[0][0].data
    copies = dict.fromkeys(entry["data"][data] for entry in results.provenance if data in entry.get("data", {}))
    return "; ".join([*parts, f"data: {DATA[data]}, {' and '.join(copies) or 'provenance not recorded'}"])


def _ends(curves: Sequence[Curve], column: Column) -> str:
    """Return the last values of the curves in words, or their range if there are many."""
    ends = {curve.name: float(curve.points(column).mean[-1]) for curve in curves}
    words = {name: cells.decimal(end) if column == "loss" else cells.percent(end / 100) for name, end in ends.items()}
    if len(ends) <= MOST_IN_WORDS:
        return ", ".join(f"{name} {text}" for name, text in words.items())
    low, high = min(ends, key=lambda name: ends[name]), max(ends, key=lambda name: ends[name])
    full = f", FullNets {words['FullNets']}" if {"FullNets"} <= {*ends} - {low, high} else ""
    return f"from {words[low]} ({low}) to {words[high]} ({high}){full}"
