"""The paper's own arithmetic, recomputed: every coverage index, size, cost and ratio that it printed.

An accuracy in Tables 1 and 2 is compared with the appendix's row for the same federation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fedcover.audit import Audit, audit_code
from fedcover.paper.published import Row, Table, agrees, tables

ACCURACIES = ("iid", "non_iid_global", "non_iid_local")
BYTES_AS_PRINTED = 8


@dataclass(frozen=True)
class Cell:
    """A printed cell that does not add up."""

    table: str
    row: str
    code: str
    column: str
    printed: str
    correct: str
    why: str


def wrong_cells() -> list[Cell]:
    """All cells that do not follow from the row's own code, or from the appendix."""
    return [cell for table in tables().values() for row in table.rows for cell in _wrong(table, row)]


def audit_rows() -> list[dict[str, str]]:
    """The cells that do not add up, as rows of a table."""
    return [
        {
            "table": cell.table,
            "row": cell.row,
            "column": cell.column,
            "printed": cell.printed,
            "correct": cell.correct,
            "why": cell.why,
        }
        for cell in wrong_cells()
    ]


def _wrong(table: Table, row: Row) -> Iterator[Cell]:
    found = audit_row(row.technique, row.code, table.model)
    for column, printed in row.printed.items():
        if column in ACCURACIES:
            yield from _wrong_accuracy(table, row, column, printed)
            continue
        value, text = expected(found, column)
        if not adds_up(column, printed, value):
            yield Cell(table.key, row.name, row.code, column, printed, text, "does not follow from the code")


def adds_up(column: str, printed: str, value: float) -> bool:
    """Whether a printed cell shows the value: a coverage index is whole, other cells show some of its digits."""
    return int(printed) == value if column == "gamma_min" else agrees(printed, value)


def _wrong_accuracy(table: Table, row: Row, column: str, printed: str) -> Iterator[Cell]:
    source = tables().get(f"{'mnist' if table.data == 'mnist' else 'cifar'}-{row.technique.lower()}")
    if table.source == "appendix" or source is None:
        return
    same = next(other for other in source.rows if other.code == row.code)
    if column in same.printed and not agrees(printed, float(same.printed[column])):
        taken = [other.code for other in source.rows if agrees(printed, float(other.printed[column]))]
        swapped = {"non_iid_local": "non_iid_global", "non_iid_global": "non_iid_local"}.get(column)
        if swapped and agrees(printed, float(same.printed[swapped])):
            why = "local and global are swapped against the appendix"
        elif taken:
            why = f"is the appendix's row {', '.join(taken)}"
        else:
            why = "is not in the appendix"
        yield Cell(table.key, row.name, row.code, column, printed, same.printed[column], why)


def expected(found: Audit, column: str) -> tuple[float, str]:
    """The correct value of a column, and how to show it."""
    space = found.parameters * BYTES_AS_PRINTED
    ratios = {
        "ratio": found.macs_ratio,
        "macs_ratio": found.macs_ratio,
        "parameters_ratio": found.parameters_ratio,
        "space_ratio": found.parameters_ratio,
    }
    if column in ratios:
        return ratios[column], f"{ratios[column]:.3f}"
    amounts = {
        "gamma_min": (found.gamma_min, f"{found.gamma_min}"),
        "parameters": (found.parameters, f"{found.parameters:,.0f}"),
        "macs": (found.macs, f"{found.macs:,.0f}"),
        "macs_k": (found.macs / 1e3, f"{found.macs / 1e3:.2f}"),
        "space": (space, f"{space:,.0f}"),
        "space_k": (space / 1e3, f"{space / 1e3:.2f}"),
    }
    return amounts[column]


@cache
def audit_row(technique: str, code: str, model: str) -> Audit:
    """The audit of a row; every row of a code and technique shares one."""
    return audit_code(code, technique, model)
