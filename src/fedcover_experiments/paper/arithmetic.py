"""The paper's arithmetic, recomputed: every printed coverage index, size, cost and ratio.

Accuracies in Tables 1 and 2 are compared with the appendix's row of the same federation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fedcover.audit import Audit, audit_code
from fedcover_experiments.paper.published import COLUMNS, Row, Table, agrees, tables

ACCURACIES = ("iid", "non_iid_global", "non_iid_local")
BYTES_AS_PRINTED = 8
_COUNT = "does not follow from the row's ten clients"
OPEN_RULE = (
    "does not follow the text's rule, which leaves a pruned client 48.4 thousand parameters; "
    "the printed cells need 45.1"
)
"""The reason for the cells of weight pruning on CIFAR-10, whose rule the text leaves open."""


@dataclass(frozen=True)
class PrintedCell:
    """A printed cell that does not add up."""

    table: str
    row: str
    code: str
    column: str
    printed: str
    correct: str
    why: str


@cache
def wrong_cells() -> tuple[PrintedCell, ...]:
    """Return all cells that do not follow from the row's own code or from the appendix."""
    return tuple(cell for table in tables().values() for row in table.rows for cell in _wrong(table, row))


def audit_rows() -> list[dict[str, str]]:
    """Return the cells that do not add up as rows of a table."""
    return [
        {
            "table": cell.table,
            "row": cell.row,
            "column": COLUMNS[cell.column],
            "printed": cell.printed,
            "correct": cell.correct,
            "why": cell.why,
        }
        for cell in wrong_cells()
    ]


def _wrong(table: Table, row: Row) -> Iterator[PrintedCell]:
    audit = audit_row(row.policy, row.code, table.model)

    def cell(column: str, printed: str, correct: str, why: str) -> PrintedCell:
        return PrintedCell(table.key, row.name, row.code, column, printed, correct, why)

    if not audit.gamma_min and "gamma_min" not in row.printed:
        yield cell("gamma_min", "–", "0", "no client's mask has part of the model: the condition of convergence fails")
    for column, printed in row.printed.items():
        if column in ACCURACIES:
            if wrong := _wrong_accuracy(table, row, column, printed):
                yield cell(column, printed, *wrong)
            continue
        value, text = expected(audit, column)
        if not adds_up(column, printed, value):
            yield cell(column, printed, text, OPEN_RULE if (table.data, row.policy) == ("cifar10", "WP") else _COUNT)


def adds_up(column: str, printed: str, value: float) -> bool:
    """Return whether a printed cell shows the value: a coverage index exactly, other cells to the printed digits."""
    return int(printed) == value if column == "gamma_min" else agrees(printed, value)


def _wrong_accuracy(table: Table, row: Row, column: str, printed: str) -> tuple[str, str] | None:
    """Return the right accuracy and the reason if a printed one is not the appendix's or belongs to another row."""
    family = [other for key, other in tables().items() if other.source == "appendix" and other.data == table.data]
    if table.source == "appendix":
        return _copied(table, row, column)
    if row.policy == "full":
        theirs = [r.printed[column] for t in family for r in t.rows if r.code == row.code and column in r.printed]
        if any(agrees(printed, float(text)) for text in theirs):
            return None
        return " or ".join(theirs), "is in none of the appendix's tables, which disagree about this federation"
    source = next(other for other in family if other.rows[1].policy == row.policy)
    same = next(other for other in source.rows if other.code == row.code)
    if column not in same.printed or agrees(printed, float(same.printed[column])):
        return None
    swapped = {"non_iid_local": "non_iid_global", "non_iid_global": "non_iid_local"}.get(column)
    taken = [other.code for other in source.rows if agrees(printed, float(other.printed[column]))]
    if swapped and abs(float(printed) - float(same.printed[swapped])) < 0.015:
        return same.printed[column], "local and global are swapped compared with the appendix"
    return same.printed[column], f"is from the appendix's row {', '.join(taken)}" if taken else "is not in the appendix"


def _copied(table: Table, row: Row, column: str) -> tuple[str, str] | None:
    """Return why a row is doubtful that repeats both non-IID accuracies of an earlier row."""
    pair = ("non_iid_global", "non_iid_local")
    if column not in pair:
        return None
    mine = [row.printed.get(name) for name in pair]
    earlier = [o.code for o in table.rows[: table.rows.index(row)] if [o.printed.get(name) for name in pair] == mine]
    return (
        ("?", f"both non-IID cells equal those of row {earlier[0]}: one of the two rows was copied")
        if earlier
        else None
    )


def expected(audit: Audit, column: str) -> tuple[float, str]:
    """Return the correct value of a column, as a number and as text."""
    space = audit.parameters * BYTES_AS_PRINTED
    ratios = {
        "ratio": audit.macs_ratio,
        "macs_ratio": audit.macs_ratio,
        "parameters_ratio": audit.parameters_ratio,
        "space_ratio": audit.parameters_ratio,
    }
    if column in ratios:
        return ratios[column], f"{ratios[column]:.3f}"
    amounts = {
        "gamma_min": (audit.gamma_min, f"{audit.gamma_min}"),
        "parameters": (audit.parameters, f"{audit.parameters:,.0f}"),
        "macs": (audit.macs, f"{audit.macs:,.0f}"),
        "macs_k": (audit.macs / 1e3, f"{audit.macs / 1e3:.2f}"),
        "space": (space, f"{space:,.0f}"),
        "space_k": (space / 1e3, f"{space / 1e3:.2f}"),
    }
    return amounts[column]


@cache
def audit_row(policy: str, code: str, model: str) -> Audit:
    """Return the audit of a row; rows with the same code, policy and model share it."""
    return audit_code(code, policy, model)
