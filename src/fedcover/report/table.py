"""Tables of formatted cells, for the page and the console."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from fedcover.federation.history import RoundRecord
from fedcover.report import format as cells
from fedcover.report.loading import AnyPath, LoadedRun, open_runs
from fedcover.report.measures import Measures, mean, metric_names, metrics_of, present
from fedcover.report.methods import MethodComparison, compare_methods, group_runs, has_seeds, mean_and_deviation
from fedcover.report.traffic import wire_of
from fedcover.toml import flatten

MOST_ROWS, MOST_ROWS_IN_ALL = 1000, 2000
"""The most rounds of a run, and of all runs, that a page shows as rows."""
UNDECIDED = "no difference found"
HIGHER_IS_BETTER = {"accuracy", "local accuracy", "f1", "auc", "r2", "precision", "recall"}
LOWER_IS_BETTER = {"loss", "rmse", "mse", "mae", "perplexity", "error"}


def comparison_rows(runs: Iterable[LoadedRun | AnyPath]) -> list[dict[str, str]]:
    """Return one row per run: a dict from column header to formatted cell, with the same headers in every row.

    Metrics, local accuracy and loss are those of the last evaluated round; Gamma_min is the least and
    ``uncovered`` the worst over rounds; delta^2 and ``kept`` are means over rounds and clients.

    >>> for row in comparison_rows(["runs/full", "runs/wp"]):  # doctest: +SKIP
    ...     print(row["run"], row["accuracy"], row["Γmin"])
    full 98.21 % 10 of 10
    wp 97.91 % 4 of 10
    """
    opened = open_runs(runs)
    names = metric_names(run.history for run in opened)
    return [{"run": run.name, **_cells([run.measures], names)} for run in opened]


def method_rows(runs: Iterable[LoadedRun | AnyPath]) -> list[dict[str, str]]:
    """Return one row per method: the number of its seeds, and mean ± standard deviation of metrics and loss over them.

    Runs whose settings differ only in their seeds are one method. Gamma_min is the least over seeds,
    ``uncovered`` the worst, and costs are means. There are no rows if no method has several runs.
    """
    methods = group_runs(open_runs(runs))
    if not has_seeds(methods):
        return []
    names = metric_names(run.history for method in methods for run in method.runs)
    return [{"method": m.name, "seeds": f"{len(m.runs)}", **_cells(m.measures, names)} for m in methods]


def paired_rows(runs: Iterable[LoadedRun | AnyPath]) -> list[dict[str, str]]:
    """Return one row per pair of methods and metric: a paired t-test over common seeds, corrected by Holm's method."""
    return [
        {
            "first": c.first,
            "second": c.second,
            "metric": c.metric,
            "difference": _difference(c.metric, c.difference.mean),
            "95 % interval": f"{_difference(c.metric, c.difference.low)} to {_difference(c.metric, c.difference.high)}",
            "p (Holm)": cells.p_value(c.p, 4),
            "pairs": f"{c.difference.pairs}",
            "verdict": _verdict(c),
        }
        for c in compare_methods(group_runs(open_runs(runs)))
    ]


def _difference(metric: str, value: float) -> str:
    return cells.signed(100 * value) if metric == "accuracy" else cells.signed(value, 4)


def _verdict(comparison: MethodComparison) -> str:
    if not comparison.significant:
        return UNDECIDED
    return "first is higher" if comparison.difference.mean > 0 else "first is lower"


def _cells(numbers: Sequence[Measures], metrics: Sequence[str]) -> dict[str, str]:
    """Return the cells of one run, or means and deviations of the runs of a method."""

    def average(name: str, form: Callable[[float], str]) -> str:
        return mean_and_deviation([getattr(m, name) for m in numbers], form)

    forms = {name: cells.percent if name == "accuracy" else cells.decimal for name in metrics}
    row = {name: mean_and_deviation([m.metrics.get(name) for m in numbers], form) for name, form in forms.items()}
    if "accuracy" in metrics:
        row["local accuracy"] = average("local_accuracy", cells.percent)
    cohorts = min(m.clients[0] for m in numbers), max(m.clients[1] for m in numbers)
    uncovered = max(m.uncovered for m in numbers)
    lengths = sorted({m.rounds for m in numbers})
    return row | {
        "loss": average("loss", cells.decimal),
        "Γmin": f"{min(m.gamma_min for m in numbers)} of {cells.clients(cohorts)}",
        "uncovered": cells.percent(uncovered) if uncovered > 0 else "0 %",
        "mean δ²": cells.decimal(mean(present(m.pruning_noise for m in numbers))),
        "kept": cells.percent(mean(present(m.kept for m in numbers)), 1),
        "MB down": cells.megabytes(fmean(m.bytes_down for m in numbers)),
        "MB up": cells.megabytes(fmean(m.bytes_up for m in numbers)),
        "seconds": cells.seconds(fmean(m.seconds for m in numbers)),
        "rounds": cells.clients((lengths[0], lengths[-1])),
    }


def best_names(numbers: Mapping[str, Sequence[Measures]]) -> dict[str, set[str]]:
    """Return the names with the best mean in each column whose direction is clear; several if they tie."""
    columns: dict[str, dict[str, float | None]] = {
        "local accuracy": {name: mean(present(m.local_accuracy for m in ms)) for name, ms in numbers.items()},
        "loss": {name: mean(present(m.loss for m in ms)) for name, ms in numbers.items()},
    }
    for metric in {metric for ms in numbers.values() for m in ms for metric in m.metrics}:
        columns[metric] = {name: mean(present(m.metrics.get(metric) for m in ms)) for name, ms in numbers.items()}
    best: dict[str, set[str]] = {}
    for header, column in columns.items():
        sign = 1 if header in HIGHER_IS_BETTER else -1 if header in LOWER_IS_BETTER else 0
        valid = {name: sign * value for name, value in column.items() if value is not None and value == value}
        if len(set(valid.values())) > 1:
            top = max(valid.values())
            best[header] = {name for name, value in valid.items() if value == top}
    return best


def round_rows(run: LoadedRun, most: int = MOST_ROWS) -> list[dict[str, str]]:
    """Return one row per round; of long runs every k-th round, the last, and those that left a client out."""
    step = -(-len(run.history) // most)
    shown = [record for index, record in enumerate(run.history) if index % step == 0 or record.rejected]
    if shown[-1] is not run.history.last:
        shown.append(run.history.last)
    names = metric_names([run.history])
    rows = [_round_cells(record, names) for record in shown]
    for header in ("robust to", "withheld", "wire MB", "full models' MB", "left out", "limited"):
        if not any(row[header] for row in rows):
            for row in rows:
                del row[header]
    return rows


def _round_cells(record: RoundRecord, metrics: Sequence[str]) -> dict[str, str]:
    wire, measured = wire_of(record), metrics_of(record)
    forms = {name: cells.percent if name == "accuracy" else cells.decimal for name in metrics}
    row = {"round": f"{record.round}", **{name: form(measured.get(name)) for name, form in forms.items()}}
    if "accuracy" in metrics:
        row["local accuracy"] = cells.percent(record.local_accuracy)
    return row | {
        "loss": cells.decimal(record.loss),
        "train loss": cells.decimal(record.train_loss),
        "Γmin": f"{record.gamma_min} of {len(record.cohort)}",
        "robust to": f"{record.robust_to}" if record.robust_to else "",
        "uncovered": cells.percent(record.uncovered) if record.uncovered > 0 else "0 %",
        "withheld": cells.percent(record.withheld) if record.withheld > 0 else "",
        "mean δ²": cells.decimal(record.pruning_noise),
        "max δ²": cells.decimal(record.pruning_noise_max),
        "kept": cells.percent(mean(record.kept), 1),
        "MB down": cells.megabytes(record.bytes_down),
        "MB up": cells.megabytes(record.bytes_up),
        "wire MB": cells.megabytes(wire[0] + wire[1]) if wire else "",
        "full models' MB": cells.megabytes(wire[2]) if wire else "",
        "seconds": cells.seconds(sum(record.seconds.values())),
        "left out": _reasons(record.rejected),
        "limited": _reasons(record.limited),
    }


def _reasons(entries: Sequence[dict[str, Any]]) -> str:
    return "; ".join(f"client {entry.get('client')}: {entry.get('reason')}" for entry in entries)


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
