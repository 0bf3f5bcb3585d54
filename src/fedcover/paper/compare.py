"""Our runs beside the paper's tables: mean and deviation over seeds, what was published, and the difference."""

from dataclasses import dataclass
from statistics import fmean, stdev

from fedcover.audit import Audit
from fedcover.paper.arithmetic import ACCURACIES, adds_up, audit_row, expected
from fedcover.paper.experiments import Experiment
from fedcover.paper.published import Row, Table
from fedcover.paper.results import Outcome, Results
from fedcover.report.cells import MISSING

SPLIT_OF = {"iid": "iid", "non_iid_global": "non-iid", "non_iid_local": "non-iid"}
HEADS = {"iid": "IID", "non_iid_global": "non-IID, global", "non_iid_local": "non-IID, local"}
COSTS = {
    "gamma_min": "Γmin",
    "parameters": "parameters",
    "macs": "MACs",
    "macs_k": "MACs, K",
    "space": "space at 8 B",
    "space_k": "space at 8 B, K",
    "ratio": "ratio",
    "parameters_ratio": "ratio of parameters",
    "macs_ratio": "ratio of MACs",
    "space_ratio": "ratio of space",
}
"""What the paper's columns of costs are called here."""


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
    def deviation(self) -> float:
        """The sample's standard deviation over seeds; 0 for a single one."""
        return stdev(self.ours) if len(self.ours) > 1 else 0.0

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


def accuracy_rows(table: Table, results: Results) -> list[dict[str, str]]:
    """The table's accuracies: ours, published, difference."""
    rows = []
    for row in table.rows:
        cells = _names(row)
        for column in (name for name in ACCURACIES if name in row.printed):
            found, head = compared(table, row, column, results), HEADS[column]
            cells[f"{head}: ours"] = f"{found.mean:.2f} ± {found.deviation:.2f}" if found else MISSING
            cells[f"{head}: paper"] = row.printed[column]
            cells[f"{head}: difference"] = signed(found.difference) if found else MISSING
        rows.append(cells)
    return rows


def cost_rows(table: Table) -> tuple[list[dict[str, str]], dict[tuple[int, str], str]]:
    """The table's coverage and costs, recomputed beside what was printed; and which printed cells do not add up."""
    rows, marks = [], {}
    for place, row in enumerate(table.rows):
        found = audit_row(row.technique, row.code, table.model)
        cells = _names(row)
        if "gamma_min" not in row.printed:
            cells["Γmin"] = str(found.gamma_min)
        for column in (name for name in row.printed if name not in ACCURACIES):
            value, text = expected(found, column)
            cells[COSTS[column]], head = text, f"{COSTS[column]}: paper"
            cells[head] = row.printed[column]
            if not adds_up(column, row.printed[column], value):
                marks[place, head] = "bad"
        cells["bytes to hold it"] = f"{4 * found.parameters:,.0f}"
        cells["FLOPs of a step"] = f"{_flops(found) / 1e6:.2f} M"
        rows.append(cells)
    return rows, marks


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign; a real minus.

    >>> signed(-0.338), signed(0.001)
    ('−0.34', '0.00')
    """
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(text.replace("−", "-")) == 0 else text


def _names(row: Row) -> dict[str, str]:
    return {"row": row.name} if row.name == row.code else {"row": row.name, "code": row.code}


def _flops(found: Audit) -> float:
    """FLOPs of a training step on a batch of 10, the mean over the cohort."""
    return sum(len(policy.slots) * policy.flops_of_step for policy in found.policies) / found.clients
