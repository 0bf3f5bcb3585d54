"""Our runs beside the paper's tables: mean and deviation over seeds, the published value, and the difference."""

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
"""The titles of the variants in the table of departures."""


@dataclass(frozen=True)
class Compared:
    """Our accuracy, in percent by seed, and the published one."""

    ours: tuple[float, ...]
    published: float

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.ours)

    @property
    def difference(self) -> float:
        """Our mean minus the published value."""
        return self.mean - self.published


def experiment_of(table: Table, row: Row, split: str) -> Experiment:
    """Return the experiment of a row."""
    whole = not set(row.code) - {"1"}
    return Experiment(table.data, split, "full" if whole else row.policy, row.code)


def last_accuracy(outcome: Outcome) -> float:
    """Return the accuracy of the global model after the last round in which it was evaluated."""
    return next(value for value in reversed(outcome.accuracy) if value is not None)


def compared(table: Table, row: Row, column: str, results: Results) -> Compared | None:
    """Return our accuracy of one cell beside the published one; None if it was not run."""
    outcomes = results.of(experiment_of(table, row, SPLIT_OF[column]))
    values = [o.local_accuracy if column == "non_iid_local" else last_accuracy(o) for o in outcomes]
    ours = tuple(100 * value for value in values if value is not None)
    return Compared(ours, float(row.printed[column])) if ours else None


Marks = dict[tuple[int, str], str]
"""The marks of cells, by row number and column."""


def accuracy_rows(table: Table, results: Results) -> tuple[list[dict[str, str]], Marks]:
    """Return the table's accuracies (ours, published, difference) and marks of the doubtful published cells."""
    wrong = {(cell.row, cell.column) for cell in wrong_cells() if cell.table == table.key}
    rows, marks = [], Marks()
    for number, row in enumerate(table.rows):
        cells = _names(row)
        for column in (name for name in ACCURACIES if name in row.printed):
            pair, head = compared(table, row, column, results), COLUMNS[column]
            cells[f"{head}: ours"] = mean_and_deviation(pair.ours) if pair else MISSING
            cells[f"{head}: paper"] = row.printed[column]
            cells[f"{head}: difference"] = signed(pair.difference) if pair else MISSING
            if (row.name, column) in wrong:
                marks[number, f"{head}: paper"] = "bad"
        rows.append(cells)
    return rows, marks


def cost_rows(table: Table) -> tuple[list[dict[str, str]], Marks]:
    """Return the table's coverage and costs, recomputed and printed, and marks of cells that do not add up."""
    rows, marks = [], Marks()
    for number, row in enumerate(table.rows):
        audit = audit_row(row.policy, row.code, table.model)
        cells = _names(row)
        if "gamma_min" not in row.printed:
            cells["Γmin"] = str(audit.gamma_min)
        for column in (name for name in row.printed if name not in ACCURACIES):
            value, text = expected(audit, column)
            cells[COLUMNS[column]], head = text, f"{COLUMNS[column]}: paper"
            cells[head] = row.printed[column]
            if not adds_up(column, row.printed[column], value):
                marks[number, head] = "bad"
        cells["bytes of the parameters"] = f"{4 * audit.parameters:,.0f}"
        cells["FLOPs of a step, batch of 10"] = f"{_flops(audit) / 1e6:.2f} M"
        rows.append(cells)
    return rows, marks


def plain_rows(table: str, results: Results) -> list[dict[str, str]]:
    """Return the accuracies of experiments for which the paper printed no numbers."""
    in_table = experiments(table)
    several = len({experiment.policy for experiment in in_table} - {"full"}) > 1
    rows: dict[str, dict[str, str]] = {}
    for experiment in in_table:
        outcomes = results.of(experiment)
        name = f"{experiment.policy} {experiment.code}" if several else experiment.code
        name = name if experiment.data == "mnist" or not several else f"{name}, CIFAR-10"
        if outcomes:
            cells = rows.setdefault(name, {"row": name, "Γmin": str(outcomes[0].gamma_min)})
            head = COLUMNS["iid" if experiment.split == "iid" else "non_iid_global"]
            cells[head] = mean_and_deviation([100 * last_accuracy(outcome) for outcome in outcomes])
    heads = list(dict.fromkeys(head for cells in rows.values() for head in cells))
    return [{head: cells.get(head, MISSING) for head in heads} for cells in rows.values()]


def departure_rows(column: str, results: Results) -> list[dict[str, str]]:
    """Return the published WP column beside our runs of Algorithm 1 and of each departure of the authors' script.

    The last two rows have the mean and the largest distance from the published column.
    """
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
    for name, condense in (("mean distance", fmean), ("largest distance", max)):
        cells = {head: f"{condense(gaps[head]):.2f}" if head in gaps else MISSING for head in DEPARTURES.values()}
        rows.append({"row": name, "paper": MISSING, **cells})
    return rows


def _names(row: Row) -> dict[str, str]:
    return {"row": row.name} if row.name == row.code else {"row": row.name, "code": row.code}


def _flops(audit: Audit) -> float:
    """Return the FLOPs of a training step on a batch of 10, the mean over the cohort."""
    return sum(len(pattern.slots) * pattern.flops_of_step for pattern in audit.patterns) / audit.clients
