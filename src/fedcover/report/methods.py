"""Runs grouped by method: runs whose settings differ only in their seeds."""

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

from fedcover.federation.fingerprint import NOT_PART_OF_A_RUN
from fedcover.report.loading import LoadedRun, numbered, printable
from fedcover.report.measures import Measures, metric_names
from fedcover.report.statistics import Difference, holm, paired
from fedcover.toml import flatten

_IGNORED = {"seed", "name", "budgets.keeps"}
"""Keys that may differ within a method; ``budgets.keeps`` is a record of what the budgets came to."""
_SEED = re.compile(r"[-_,. ]*seed[-_= ]?\d+", re.IGNORECASE)
SIGNIFICANT = 0.05
SKEW = "label skew"
"""The key of the label skew in the data of ``method.json``."""
SIMILAR = 0.2
"""The largest difference in label skew between partitions that may differ only in their seed."""


@dataclass(frozen=True)
class MethodRuns:
    """The runs of one method, one for each seed."""

    name: str
    runs: tuple[LoadedRun, ...]

    @property
    def by_seed(self) -> dict[int, LoadedRun]:
        """The runs by their seeds."""
        return {run.config.get("seed", 0): run for run in self.runs}

    @property
    def measures(self) -> list[Measures]:
        """The numbers of each run."""
        return [run.measures for run in self.runs]


@dataclass(frozen=True)
class MethodComparison:
    """A paired test of one metric of two methods over their common seeds."""

    first: str
    second: str
    metric: str
    difference: Difference
    p: float
    """The p-value, with Holm's correction over all pairs of methods."""

    @property
    def significant(self) -> bool:
        """True if the difference is unlikely to be chance."""
        return self.p < SIGNIFICANT


def group_runs(runs: Sequence[LoadedRun]) -> list[MethodRuns]:
    """Return the methods of the runs, in the order of their first runs.

    Runs belong to one method if their settings, and what ``method.json`` states, differ only in the seed; a name, an
    engine or a number of workers is not a difference. Runs from Python, whose settings do not describe the partition,
    must also have the same data and similar label skew. Runs that repeat a seed are not grouped.
    """
    groups: dict[str, list[LoadedRun]] = {}
    for number, run in enumerate(runs):
        seed = run.config.get("seed")
        key = _key(run) if isinstance(seed, int) else f"single {number}"
        groups.setdefault(key, []).append(run)
    members: list[tuple[LoadedRun, ...]] = []
    for group in (part for whole in groups.values() for part in _by_skew(whole)):
        distinct = len({run.config.get("seed") for run in group}) == len(group)
        members += [tuple(group)] if distinct else [(run,) for run in group]
    names = [_common_name(group) for group in members]
    if len(set(names)) < len(names):
        names = _names_by_settings(members, names)
    return [MethodRuns(name, group) for name, group in zip(numbered(names), members, strict=True)]


def has_seeds(methods: Sequence[MethodRuns]) -> bool:
    """Return whether any method has several runs."""
    return any(len(method.runs) > 1 for method in methods)


def compare_methods(methods: Sequence[MethodRuns]) -> list[MethodComparison]:
    """Return a paired t-test of each metric for each pair of methods with at least two common seeds."""
    comparisons = []
    for metric in metric_names(run.history for method in methods for run in method.runs):
        differences = {}
        for first, second in combinations(methods, 2):
            pairs = _pairs(first, second, metric)
            if len(pairs) > 1:
                differences[first.name, second.name] = paired([a for a, _ in pairs], [b for _, b in pairs])
        corrected = holm([difference.p for difference in differences.values()])
        comparisons += [
            MethodComparison(*names, metric, difference, p)
            for (names, difference), p in zip(differences.items(), corrected, strict=True)
        ]
    return comparisons


def mean_and_deviation(values: Sequence[float | None], form: Callable[[float], str]) -> str:
    """Return the mean and the sample standard deviation of the values that were measured, each in the given form."""
    measured = [value for value in values if value is not None]
    if not measured:
        return "–"
    if len(measured) == 1:
        return form(measured[0])
    mean, percent = form(fmean(measured)).removesuffix(" %"), form(fmean(measured)).endswith(" %")
    spread = stdev(measured)
    digits = len(mean.partition(".")[2])
    deviation = form(spread) if "e" in mean else f"{100 * spread if percent else spread:.{digits}f}"
    return f"{mean} ± {deviation}{' %' if percent else ''}"


def _key(run: LoadedRun) -> str:
    """Return a text that is equal for runs of one method."""
    swept = run.swept is not None  # what a sweep varies makes a method, such as a callback's setting
    flat = {
        key: value
        for key, value in flatten(run.config if run.swept is None else run.swept)
        if key not in _IGNORED and (swept or key == "rounds" or key.partition(".")[0] not in NOT_PART_OF_A_RUN)
    }
    method = {**run.method, "data": {key: text for key, text in _data_of(run).items() if key != SKEW}}
    place: Any = str(run.path.resolve().parent) if swept else method
    return json.dumps([flat, place, run.planned_rounds], sort_keys=True, default=str)


def _data_of(run: LoadedRun) -> dict[str, Any]:
    """Return what ``method.json`` states about the data; nothing in runs of the command line and of older versions."""
    data = run.method.get("data")
    return data if isinstance(data, dict) else {}


def _by_skew(runs: Sequence[LoadedRun]) -> list[list[LoadedRun]]:
    """Return runs in groups whose label skew is similar; skew varies a little with the seed of a partition."""
    skews = {id(run): float(_data_of(run).get(SKEW, 0.0)) for run in runs}
    groups: list[list[LoadedRun]] = []
    for run in sorted(runs, key=lambda run: skews[id(run)]):
        if groups and skews[id(run)] - skews[id(groups[-1][0])] <= SIMILAR:
            groups[-1].append(run)
        else:
            groups.append([run])
    places = {id(run): place for place, run in enumerate(runs)}
    ordered = [sorted(group, key=lambda run: places[id(run)]) for group in groups]
    return sorted(ordered, key=lambda group: places[id(group[0])])


def _pairs(first: MethodRuns, second: MethodRuns, metric: str) -> list[tuple[float, float]]:
    """Return the last values of a metric for each common seed of two methods.

    Runs are compared once they have ended, which a callback may have decided, or else after equally many rounds.
    """
    theirs = second.by_seed
    pairs = []
    for seed, run in first.by_seed.items():
        if seed in theirs and _comparable(run, theirs[seed]):
            values = run.measures.metrics.get(metric), theirs[seed].measures.metrics.get(metric)
            if values[0] is not None and values[1] is not None:
                pairs.append((values[0], values[1]))
    return pairs


def _comparable(first: LoadedRun, second: LoadedRun) -> bool:
    both_ended = first.summary is not None and second.summary is not None
    return both_ended or len(first.history) == len(second.history)


def _common_name(runs: Sequence[LoadedRun]) -> str:
    """Return a name for the runs of one method: what their names share, without seeds."""
    if len(runs) == 1 and runs[0].swept is None:
        return runs[0].name
    if runs[0].swept is not None:
        settings = {key.removesuffix(".name"): value for key, value in runs[0].swept.items() if key not in _IGNORED}
        if len(settings) == 1 and isinstance(value := next(iter(settings.values())), str):
            return printable(value)
        named = ", ".join(f"{key}={value}" for key, value in settings.items())
        return printable(named) or printable(runs[0].path.resolve().parent.name) or "sweep"
    names = {_SEED.sub("", run.name) for run in runs}
    if len(names) == 1 and (name := names.pop()):
        return name
    shared = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071 - names are not paths
    shared = shared.rstrip("0123456789").rstrip(" -_=.,(#")
    return shared or f"{runs[0].name} and {len(runs) - 1} more"


def _names_by_settings(members: Sequence[Sequence[LoadedRun]], names: Sequence[str]) -> list[str]:
    """Return names made of the settings in which methods differ, for those whose names are not distinct."""
    flat = [dict(flatten(group[0].config)) for group in members]
    keys = dict.fromkeys(key for settings in flat for key in settings if key not in _IGNORED)
    differing = [key for key in keys if len({str(settings.get(key)) for settings in flat}) > 1][:3]
    parts = [", ".join(f"{key.removesuffix('.name')}={s.get(key)}" for key in differing) for s in flat]
    return [
        f"{name} ({part})" if names.count(name) > 1 and part else name for name, part in zip(names, parts, strict=True)
    ]
