"""Tables of formatted cells, for the page and the console."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from fedcover.federation.history import RoundRecord
from fedcover.report import format as cells
from fedcover.report.loading import AnyPath, LoadedRun, open_runs
from fedcover.report.measures import Measures, mean, measure
from fedcover.report.traffic import wire_of
from fedcover.toml import flatten

MOST_ROWS = 1000
"""The most rounds of a run that a page shows as rows."""


def comparison_rows(runs: Iterable[LoadedRun | AnyPath]) -> list[dict[str, str]]:
    """Return one row per run: a dict from column header to formatted cell, with the same headers in every row.

    Accuracy, local accuracy and loss are those of the last evaluated round; Gamma_min is the least and
    ``uncovered`` the worst over rounds; delta^2 and ``kept`` are means over rounds and clients.

    >>> for row in comparison_rows(["runs/full", "runs/wp"]):  # doctest: +SKIP
    ...     print(row["run"], row["accuracy"], row["Γmin"])
    full 98.21 % 10 of 10
    wp 97.91 % 4 of 10
    """
    return [{"run": run.name, **_cells(measure(run.history))} for run in open_runs(runs)]


def _cells(numbers: Measures) -> dict[str, str]:
    return {
        "accuracy": cells.percent(numbers.accuracy),
        "local accuracy": cells.percent(numbers.local_accuracy),
        "loss": cells.decimal(numbers.loss),
        "Γmin": f"{numbers.gamma_min} of {cells.clients(numbers.clients)}",
        "uncovered": cells.percent(numbers.uncovered) if numbers.uncovered > 0 else "0 %",
        "mean δ²": cells.decimal(numbers.pruning_noise),
        "kept": cells.percent(numbers.kept, 1),
        "MB down": cells.megabytes(numbers.bytes_down),
        "MB up": cells.megabytes(numbers.bytes_up),
        "seconds": cells.seconds(numbers.seconds),
        "rounds": f"{numbers.rounds}",
    }


def best_names(runs: Sequence[LoadedRun]) -> dict[str, set[str]]:
    """Return the runs with the best value of each column in which values differ; several runs if they tie."""
    numbers = {run.name: measure(run.history) for run in runs}
    columns = {
        "accuracy": {name: m.accuracy for name, m in numbers.items()},
        "local accuracy": {name: m.local_accuracy for name, m in numbers.items()},
        "loss": {name: -m.loss if m.loss is not None else None for name, m in numbers.items()},
    }
    best: dict[str, set[str]] = {}
    for header, column in columns.items():
        valid = {name: value for name, value in column.items() if value is not None and value == value}
        if len(set(valid.values())) > 1:
            top = max(valid.values())
            best[header] = {name for name, value in valid.items() if value == top}
    return best


def round_rows(run: LoadedRun) -> list[dict[str, str]]:
    """Return one row per round; of long runs every k-th round, the last, and those that left a client out."""
    step = -(-len(run.history) // MOST_ROWS)
    shown = [record for index, record in enumerate(run.history) if index % step == 0 or record.rejected]
    if shown[-1] is not run.history.last:
        shown.append(run.history.last)
    rows = [_round_cells(record) for record in shown]
    for header in ("wire MB", "full models' MB", "left out"):
        if not any(row[header] for row in rows):
            for row in rows:
                del row[header]
    return rows


def _round_cells(record: RoundRecord) -> dict[str, str]:
    wire = wire_of(record)
    return {
        "round": f"{record.round}",
        "accuracy": cells.percent(record.accuracy),
        "local accuracy": cells.percent(record.local_accuracy),
        "loss": cells.decimal(record.loss),
        "train loss": cells.decimal(record.train_loss),
        "Γmin": f"{record.gamma_min} of {len(record.cohort)}",
        "uncovered": cells.percent(record.uncovered) if record.uncovered > 0 else "0 %",
        "mean δ²": cells.decimal(record.pruning_noise),
        "max δ²": cells.decimal(record.pruning_noise_max),
        "kept": cells.percent(mean(record.kept), 1),
        "MB down": cells.megabytes(record.bytes_down),
        "MB up": cells.megabytes(record.bytes_up),
        "wire MB": cells.megabytes(wire[0] + wire[1]) if wire else "",
        "full models' MB": cells.megabytes(wire[2]) if wire else "",
        "seconds": cells.seconds(sum(record.seconds.values())),
        "left out": "; ".join(f"client {r.get('client')}: {r.get('reason')}" for r in record.rejected),
    }


def setting_rows(settings: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, str]]:
    """Return settings side by side: one row per dotted key, which is under the header "", and one column per name."""
    flat = [_as_text(setting) for setting in settings]
    keys = list(dict.fromkeys(key for setting in flat for key in setting))
    return [{"": key, **{name: s.get(key, cells.MISSING) for name, s in zip(names, flat, strict=True)}} for key in keys]


def _as_text(settings: dict[str, Any]) -> dict[str, str]:
    """Return dotted keys with their values as text."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
        for key, value in flatten(settings)
    }
