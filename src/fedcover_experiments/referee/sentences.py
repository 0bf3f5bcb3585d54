"""Five sentences on what the leaderboard says, computed from its entries."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from fedcover.report.format import signed
from fedcover_experiments.referee.leaderboard import LEVEL, Entry
from fedcover_experiments.referee.methods import BASE
from fedcover_experiments.referee.settings import EVEN

NOBODY = "nobody-full"


def sentences(entries: Sequence[Entry]) -> list[str]:
    """Return five sentences on the entries, of which some may be reduced runs."""
    ranked = [entry for entry in entries if entry.ranked]
    if not ranked:
        return ["No method has results yet."]
    return [_first(ranked), _against_base(ranked), _gain(ranked), _worst_level(ranked), _nobody_full(ranked)]


def _first(ranked: Sequence[Entry]) -> str:
    """Return which methods are first, and in how many settings."""
    groups = _by_setting([entry for entry in ranked if not entry.over_budget])
    if not groups:
        return "No method that keeps its budgets has results yet."
    firsts = Counter(max(group, key=lambda entry: entry.accuracy).method for group in groups)
    reduced = sum(group[0].reduced for group in groups)
    runs = f", {reduced} of them with reduced runs" if reduced else ""
    listed = _listed(firsts)
    return f"Of {_count(len(groups), 'setting')}{runs}, the most accurate method within its budgets is {listed}."


def _against_base(ranked: Sequence[Entry]) -> str:
    """Return how often methods are better or worse than the base."""
    tested = [entry for entry in ranked if entry.against_base]
    if not tested:
        return f"No method can be compared with {BASE} yet, since that needs two seeds of both."
    counts = Counter(entry.verdict for entry in tested)
    best = max(tested, key=lambda entry: entry.against_base.mean if entry.against_base else 0.0)
    assert best.against_base is not None
    return (
        f"In {_count(len(tested), 'comparison')} with {BASE}, methods are better {counts['better']} times and worse"
        f" {counts['worse']} times (p < {LEVEL} after Holm's correction); the largest difference is that of"
        f" {best.method}, {signed(best.against_base.mean, 1)} points (p = {best.p:.2g})."
    )


def _gain(ranked: Sequence[Entry]) -> str:
    """Return how often methods are above the homogeneous smallest model."""
    gains = [entry for entry in ranked if entry.gain]
    if not gains:
        return "The homogeneous smallest model was not run yet, so that gains over it are not known."
    means = {entry: entry.gain.mean for entry in gains if entry.gain}
    above = sum(mean > 0 for mean in means.values())
    low, high = min(means, key=lambda entry: means[entry]), max(means, key=lambda entry: means[entry])
    return (
        f"In {above} of {_count(len(gains), 'cell')}, a method is above the homogeneous smallest model, from"
        f" {signed(means[low], 1)} points ({low.method}, {low.setting}) to {signed(means[high], 1)} points"
        f" ({high.method}, {high.setting})."
    )


def _worst_level(ranked: Sequence[Entry]) -> str:
    """Return which methods have the best worst level, and whether they are also first in global accuracy."""
    within = [entry for entry in ranked if not entry.over_budget]
    groups = [[(e, worst) for e in g if (worst := _worst(e)) is not None] for g in _by_setting(within)]
    groups = [group for group in groups if group]
    if not groups:
        return "No level was evaluated yet."
    best = [max(group, key=lambda pair: pair[1])[0] for group in groups]
    same = sum(
        entry.method == max(group, key=lambda pair: pair[0].accuracy)[0].method
        for entry, group in zip(best, groups, strict=True)
    )
    behind = fmean(100 * (entry.accuracy - worst) for group in groups for entry, worst in group)
    listed = _listed(Counter(entry.method for entry in best))
    return (
        f"The worst level is on average {behind:.1f} points below the global model; it is most accurate with {listed}"
        f" of {_count(len(groups), 'setting')}, and in {same} of them that method is also the most accurate one."
    )


def _worst(entry: Entry) -> float | None:
    return entry.mean(lambda row: row.worst_level)


def _nobody_full(ranked: Sequence[Entry]) -> str:
    """Return how accuracies change if no client can hold the full model."""
    even = {(e.setting.replace(EVEN, NOBODY), e.rounds, e.method): e for e in ranked if EVEN in e.setting}
    changes = {
        entry: 100 * (entry.accuracy - even[key].accuracy)
        for entry in ranked
        if (key := (entry.setting, entry.rounds, entry.method)) in even
    }
    if not changes:
        return "No setting was run both with and without full clients yet."
    least, most = min(changes, key=lambda e: changes[e]), max(changes, key=lambda e: changes[e])
    uncovered = sum((entry.mean(lambda row: row.uncovered) or 0.0) > 0 for entry in changes)
    return (
        f"Without a full client methods change by {signed(fmean(changes.values()), 1)} points on average, from"
        f" {signed(changes[least], 1)} ({least.method}) to {signed(changes[most], 1)} ({most.method}); {uncovered} of"
        f" {_count(len(changes), 'cell')} leave a part of the model to nobody in some round."
    )


def _by_setting(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.setting, entry.rounds), []).append(entry)
    return list(groups.values())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(counts: Counter[str]) -> str:
    """Return how often each name was counted, as text.

    >>> _listed(Counter("aaabbc"))
    'a in 3, b in 2 and c in 1'
    """
    *others, last = (f"{name} in {count}" for name, count in counts.most_common())
    return f"{', '.join(others)} and {last}" if others else last
