"""The experiments behind the paper's tables, its curves without a table, and its uncovered case."""

from collections.abc import Iterable, Sequence

from fedcover.errors import InputError
from fedcover_experiments.paper.published import Table, tables
from fedcover_experiments.runner import SPLITS, Experiment

PRETRAINED = {"mnist-pt": "mnist-wp", "cifar-pt": "cifar-wp"}
"""Pruning with a pre-trained mask has curves but no table: it is run for the codes of weight pruning."""
UNCOVERED = "uncovered"
"""The appendix's special case, in which the masks leave part of the model to nobody."""


def names() -> list[str]:
    """What ``experiments`` knows, the tables first."""
    return [*tables(), *PRETRAINED, UNCOVERED]


def title(name: str) -> tuple[str, str]:
    """Where in the paper a table's experiments are, and what they are about."""
    if name in PRETRAINED:
        return "appendix, figures", "Pruning with a pre-trained mask: curves without a table"
    if name == UNCOVERED:
        return "appendix, named only", "Masks that leave part of the model to nobody"
    return tables()[name].source, tables()[name].title


def experiments(key: str, rows: Sequence[str] = ()) -> list[Experiment]:
    """The experiments behind a table, all on a data set, or all; ``rows`` picks some by code or nickname.

    Full models are one experiment, whatever table they stand in.

    >>> [e.name for e in experiments("mnist-wp", ["1111223344"])]
    ['mnist/iid/WP-1111223344', 'mnist/non-iid/WP-1111223344']
    """
    if key not in ("all", *SPLITS, *names()):
        raise InputError(f"there is no table '{key}'; use all, {', '.join(SPLITS)}, or one of {', '.join(names())}")
    if key == "all" or key in SPLITS:
        found = [experiment for name in names() for experiment in experiments(name)]
        found = _chosen([experiment for experiment in found if key in ("all", experiment.data)], rows)
    elif key == UNCOVERED:
        found = _chosen(list(_uncovered()), rows)
    else:
        return _rows_of(key, rows)
    if not found:
        raise InputError(f"{key} has no row '{rows[0]}'; name codes such as 1111223344, or nicknames")
    return list(dict.fromkeys(found))


def _rows_of(key: str, rows: Sequence[str]) -> list[Experiment]:
    table = tables()[PRETRAINED.get(key, key)]
    known = {text for row in table.rows for text in (row.code, row.name)}
    if unknown := [row for row in rows if row not in known]:
        raise InputError(f"{key} has no row '{unknown[0]}'; use one of {', '.join(row.code for row in table.rows)}")
    pretrained = "PT" if key in PRETRAINED else None
    return list(dict.fromkeys(_of_table(table, rows, pretrained)))


def _of_table(table: Table, rows: Sequence[str], technique: str | None) -> Iterable[Experiment]:
    for split in SPLITS[table.data]:
        for row in table.rows:
            if not rows or row.code in rows or row.name in rows:
                whole = not set(row.code) - {"1"}
                yield Experiment(table.data, split, "full" if whole else technique or row.technique, row.code)


def _uncovered() -> Iterable[Experiment]:
    """No full client: the same part of the model is in nobody's mask, every round."""
    for split in SPLITS["mnist"]:
        for technique in ("WP", "NP", "FS"):
            for code in ("4444444444", "7777777777"):
                yield Experiment("mnist", split, technique, code)
    yield Experiment("cifar10", "iid", "WP", "2222333444")


def _chosen(found: Sequence[Experiment], rows: Sequence[str]) -> list[Experiment]:
    named = {row.code for table in tables().values() for row in table.rows if row.name in rows}
    codes = {*rows, *named}
    return [experiment for experiment in found if not rows or experiment.code in codes]
