"""The experiments of the paper's tables, of its curves without a table, and of its uncovered case."""

from collections.abc import Iterable, Sequence

from fedcover.errors import InputError
from fedcover_experiments.paper.published import Table, tables
from fedcover_experiments.runner import SPLITS, Experiment

PRETRAINED = {"mnist-pt": "mnist-wp", "cifar-pt": "cifar-wp"}
"""Pruning with a pre-trained mask has curves but no table; it is run with the codes of weight pruning."""
UNCOVERED = "uncovered"
"""The appendix's special case, in which no client holds part of the model."""


def names() -> list[str]:
    """Return the names that ``experiments`` accepts, the tables first."""
    return [*tables(), *PRETRAINED, UNCOVERED]


def title(name: str) -> tuple[str, str]:
    """Return where in the paper the experiments are, and their title."""
    if name in PRETRAINED:
        return "appendix, figures", "Pruning with a pre-trained mask: curves without a table"
    if name == UNCOVERED:
        return "appendix, named only", "Masks that leave part of the model uncovered"
    return tables()[name].source, tables()[name].title


def experiments(key: str, rows: Sequence[str] = ()) -> list[Experiment]:
    """Return the experiments of a table, of a data set, or all.

    Full models are one experiment, even if several tables have them.

    Args:
        key: A name of ``names()``, a data set, or ``all``.
        rows: Codes or nicknames of rows; all rows if empty.

    Raises:
        InputError: There is no such table, or it has none of the rows.

    >>> [e.name for e in experiments("mnist-wp", ["1111223344"])]
    ['mnist/iid/WP-1111223344', 'mnist/non-iid/WP-1111223344']
    """
    if key not in ("all", *SPLITS, *names()):
        raise InputError(f"there is no table '{key}'; use all, {', '.join(SPLITS)}, or one of {', '.join(names())}")
    if key == "all" or key in SPLITS:
        every = [experiment for name in names() for experiment in experiments(name)]
        chosen = _with_codes([experiment for experiment in every if key in ("all", experiment.data)], rows)
    elif key == UNCOVERED:
        chosen = _with_codes(list(_uncovered()), rows)
    else:
        return _rows_of(key, rows)
    if not chosen:
        raise InputError(f"{key} has no row '{rows[0]}'; use codes such as 1111223344, or nicknames")
    return list(dict.fromkeys(chosen))


def _rows_of(key: str, rows: Sequence[str]) -> list[Experiment]:
    table = tables()[PRETRAINED.get(key, key)]
    names_of_rows = {text for row in table.rows for text in (row.code, row.name)}
    if unknown := [row for row in rows if row not in names_of_rows]:
        raise InputError(f"{key} has no row '{unknown[0]}'; use one of {', '.join(row.code for row in table.rows)}")
    pretrained = "PT" if key in PRETRAINED else None
    return list(dict.fromkeys(_of_table(table, rows, pretrained)))


def _of_table(table: Table, rows: Sequence[str], policy: str | None) -> Iterable[Experiment]:
    for split in SPLITS[table.data]:
        for row in table.rows:
            if not rows or row.code in rows or row.name in rows:
                whole = not set(row.code) - {"1"}
                yield Experiment(table.data, split, "full" if whole else policy or row.policy, row.code)


def _uncovered() -> Iterable[Experiment]:
    """Yield experiments without a full client, in which no mask ever has the same part of the model."""
    for split in SPLITS["mnist"]:
        for policy in ("WP", "NP", "FS"):
            for code in ("4444444444", "7777777777"):
                yield Experiment("mnist", split, policy, code)
    yield Experiment("cifar10", "iid", "WP", "2222333444")


def _with_codes(every: Sequence[Experiment], rows: Sequence[str]) -> list[Experiment]:
    named = {row.code for table in tables().values() for row in table.rows if row.name in rows}
    codes = {*rows, *named}
    return [experiment for experiment in every if not rows or experiment.code in codes]
