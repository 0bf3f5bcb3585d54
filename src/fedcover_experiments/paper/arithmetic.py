"""The paper's own arithmetic, recomputed: every coverage index, size, cost and ratio that it printed.

An accuracy in Tables 1 and 2 is compared with the appendix's row for the same federation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from fedcover.audit import Audit, audit_code
from fedcover_experiments.paper.published import COLUMNS, Row, Table, agrees, tables

ACCURACIES = ("iid", "non_iid_global", "non_iid_local")
BYTES_AS_PRINTED = 8


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


def wrong_cells() -> list[PrintedCell]:
    """All cells that do not follow from the row's own code, or from the appendix."""
    return [cell for table in tables().values() for row in table.rows for cell in _wrong(table, row)]


def audit_rows() -> list[dict[str, str]]:
    """The cells that do not add up, as rows of a table."""
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
    found = audit_row(row.technique, row.code, table.model)

    def cell(column: str, printed: str, correct: str, why: str) -> PrintedCell:
        return PrintedCell(table.key, row.name, row.code, column, printed, correct, why)

    if not found.gamma_min and "gamma_min" not in row.printed:
        yield cell("gamma_min", "–", "0", "part of the model is in nobody's mask: the condition of convergence fails")
    for column, printed in row.printed.items():
        if column in ACCURACIES:
            if wrong := _wrong_accuracy(table, row, column, printed):
                yield cell(column, printed, *wrong)
            continue
        value, text = expected(found, column)
        if not adds_up(column, printed, value):
            yield cell(column, printed, text, _RULE if (table.data, row.technique) == ("cifar10", "WP") else _COUNT)


_COUNT = "does not follow from the row's ten clients"
_RULE = "is not by the text's rule, which leaves a pruned client 48.4 thousand parameters; the printed cells need 45.1"


def adds_up(column: str, printed: str, value: float) -> bool:
    """Whether a printed cell shows the value: a coverage index is whole, other cells show some of its digits."""
    return int(printed) == value if column == "gamma_min" else agrees(printed, value)


def _wrong_accuracy(table: Table, row: Row, column: str, printed: str) -> tuple[str, str] | None:
    """The right accuracy and why, for one that is not the appendix's, or is another row's in the appendix."""
    family = [other for key, other in tables().items() if other.source == "appendix" and other.data == table.data]
    if table.source == "appendix":
        return _copied(table, row, column)
    if row.technique == "full":
        theirs = [r.printed[column] for t in family for r in t.rows if r.code == row.code and column in r.printed]
        if any(agrees(printed, float(text)) for text in theirs):
            return None
        return " or ".join(theirs), "is in none of the appendix's tables, which disagree about this one federation"
    source = next(other for other in family if other.rows[1].technique == row.technique)
    same = next(other for other in source.rows if other.code == row.code)
    if column not in same.printed or agrees(printed, float(same.printed[column])):
        return None
    swapped = {"non_iid_local": "non_iid_global", "non_iid_global": "non_iid_local"}.get(column)
    taken = [other.code for other in source.rows if agrees(printed, float(other.printed[column]))]
    if swapped and abs(float(printed) - float(same.printed[swapped])) < 0.015:
        return same.printed[column], "local and global are swapped against the appendix"
    return same.printed[column], f"is the appendix's row {', '.join(taken)}" if taken else "is not in the appendix"


def _copied(table: Table, row: Row, column: str) -> tuple[str, str] | None:
    """Why a row that repeats both non-IID accuracies of an earlier one is in doubt."""
    pair = ("non_iid_global", "non_iid_local")
    if column not in pair:
        return None
    mine = [row.printed.get(name) for name in pair]
    earlier = [o.code for o in table.rows[: table.rows.index(row)] if [o.printed.get(name) for name in pair] == mine]
    return (
        ("?", f"both non-IID cells are those of row {earlier[0]}: one of the two rows was copied") if earlier else None
    )


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
