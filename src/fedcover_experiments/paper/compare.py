"""Our runs beside the paper's tables: mean and deviation over seeds, what was published, and the difference."""

from dataclasses import dataclass
from statistics import fmean

from fedcover.audit import Audit
from fedcover.report.format import MISSING, mean_and_deviation, signed
from fedcover_experiments.paper.arithmetic import ACCURACIES, adds_up, audit_row, expected, wrong_cells
from fedcover_experiments.paper.experiments import experiments
from fedcover_experiments.paper.published import COLUMNS, Row, Table, tables
from fedcover_experiments.results import Outcome, Results
from fedcover_experiments.runner import Experiment

SPLIT_OF = {"iid": "iid", "non_iid_global": "non-iid", "non_iid_local": "non-iid"}
DEPARTURES = {
    "none": "Algorithm 1",
    "rank": "rank",
    "start": "start",
    "gradient": "gradient",
    "leak": "leak",
    "all": "all four",
}
"""What the variants of the study of departures are called in its table."""


@dataclass(frozen=True)
class Compared:
    """One accuracy of ours, in percent by seed, and the published one."""

    ours: tuple[float, ...]
    published: float

    @property
    def mean(self) -> float:
        """Over seeds."""
        return fmean(self.ours)

    @property
    def difference(self) -> float:
        """Ours less the published."""
        return self.mean - self.published


def experiment_of(table: Table, row: Row, split: str) -> Experiment:
    """The experiment behind a row."""
    whole = not set(row.code) - {"1"}
    return Experiment(table.data, split, "full" if whole else row.technique, row.code)


def last_accuracy(outcome: Outcome) -> float:
    """Of the global model, after the last round that was looked at."""
    return next(value for value in reversed(outcome.accuracy) if value is not None)


def compared(table: Table, row: Row, column: str, results: Results) -> Compared | None:
    """A column of a row; None if it was not run."""
    outcomes = results.of(experiment_of(table, row, SPLIT_OF[column]))
    values = [o.local_accuracy if column == "non_iid_local" else last_accuracy(o) for o in outcomes]
    known = tuple(100 * value for value in values if value is not None)
    return Compared(known, float(row.printed[column])) if known else None


Marks = dict[tuple[int, str], str]
"""Cells to be marked, by the number of the row and the column."""


def accuracy_rows(table: Table, results: Results) -> tuple[list[dict[str, str]], Marks]:
    """The table's accuracies: ours, published, difference; and which published cells are in doubt."""
    wrong = {(cell.row, cell.column) for cell in wrong_cells() if cell.table == table.key}
    rows, marks = [], Marks()
    for place, row in enumerate(table.rows):
        cells = _names(row)
        for column in (name for name in ACCURACIES if name in row.printed):
            found, head = compared(table, row, column, results), COLUMNS[column]
            cells[f"{head}: ours"] = mean_and_deviation(found.ours) if found else MISSING
            cells[f"{head}: paper"] = row.printed[column]
            cells[f"{head}: difference"] = signed(found.difference) if found else MISSING
            if (row.name, column) in wrong:
                marks[place, f"{head}: paper"] = "bad"
        rows.append(cells)
    return rows, marks


def cost_rows(table: Table) -> tuple[list[dict[str, str]], Marks]:
    """The table's coverage and costs, recomputed beside what was printed; and which printed cells do not add up."""
    rows, marks = [], Marks()
    for place, row in enumerate(table.rows):
        found = audit_row(row.technique, row.code, table.model)
        cells = _names(row)
        if "gamma_min" not in row.printed:
            cells["Γmin"] = str(found.gamma_min)
        for column in (name for name in row.printed if name not in ACCURACIES):
            value, text = expected(found, column)
            cells[COLUMNS[column]], head = text, f"{COLUMNS[column]}: paper"
            cells[head] = row.printed[column]
            if not adds_up(column, row.printed[column], value):
                marks[place, head] = "bad"
        cells["bytes to hold it"] = f"{4 * found.parameters:,.0f}"
        cells["FLOPs of a step, batch of 10"] = f"{_flops(found) / 1e6:.2f} M"
        rows.append(cells)
    return rows, marks


def plain_rows(table: str, results: Results) -> list[dict[str, str]]:
    """The accuracies of experiments for which the paper printed no numbers."""
    found = experiments(table)
    several = len({experiment.technique for experiment in found} - {"full"}) > 1
    rows: dict[str, dict[str, str]] = {}
    for experiment in found:
        outcomes = results.of(experiment)
        name = f"{experiment.technique} {experiment.code}" if several else experiment.code
        name = name if experiment.data == "mnist" or not several else f"{name}, CIFAR-10"
        if outcomes:
            cells = rows.setdefault(name, {"row": name, "Γmin": str(outcomes[0].gamma_min)})
            head = COLUMNS["iid" if experiment.split == "iid" else "non_iid_global"]
            cells[head] = mean_and_deviation([100 * last_accuracy(outcome) for outcome in outcomes])
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    return [{head: cells.get(head, MISSING) for head in heads} for cells in rows.values()]


def departure_rows(column: str, results: Results) -> list[dict[str, str]]:
    """The published WP column against Algorithm 1, and against each departure of the authors' script; last, how far."""
    table = tables()["mnist-wp"]
    rows, gaps = [], dict[str, list[float]]()
    for row in table.rows:
        cells = {"row": row.code, "paper": row.printed[column]}
        for variant, head in DEPARTURES.items():
            outcomes = results.of(Experiment("mnist", SPLIT_OF[column], f"WP+{variant}", row.code))
            mean = fmean(100 * last_accuracy(outcome) for outcome in outcomes) if outcomes else None
            if mean is not None:
                gaps.setdefault(head, []).append(abs(mean - float(row.printed[column])))
            cells[head] = MISSING if mean is None else f"{mean:.2f}"
        rows.append(cells)
    if not gaps:
        return []
    for name, far in (("mean distance", fmean), ("largest distance", max)):
        cells = {head: f"{far(gaps[head]):.2f}" if head in gaps else MISSING for head in DEPARTURES.values()}
        rows.append({"row": name, "paper": MISSING, **cells})
    return rows


def _names(row: Row) -> dict[str, str]:
    return {"row": row.name} if row.name == row.code else {"row": row.name, "code": row.code}


def _flops(found: Audit) -> float:
    """FLOPs of a training step on a batch of 10, the mean over the cohort."""
    return sum(len(policy.slots) * policy.flops_of_step for policy in found.patterns) / found.clients
