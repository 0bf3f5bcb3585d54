"""The leaderboard: methods within a setting, compared by seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from fedcover.report.statistics import Difference, holm, paired
from fedcover_experiments.referee.methods import BASE, METHODS, SMALLEST
from fedcover_experiments.referee.rows import RefereeResults, RefereeRow
from fedcover_experiments.referee.settings import HELD_OUT

LEVEL = 0.05
Value = Callable[[RefereeRow], float | None]


@dataclass(frozen=True, eq=False)
class Entry:
    """One method in one setting, at one number of rounds: its rows by seed, and how it compares."""

    setting: str
    rounds: int
    whole_rounds: int
    """The rounds that the setting has; more than ``rounds`` if the runs are reduced."""
    method: str
    rows: tuple[RefereeRow, ...]
    """Finished runs, ordered by seed."""
    errors: tuple[str, ...] = ()
    """Why other runs failed."""
    against_base: Difference | None = None
    """Its accuracy minus that of the base, in points; None for the base and for references."""
    p: float = 1.0
    """Of ``against_base``, after Holm's correction over the methods of the setting."""
    gain: Difference | None = None
    """Its accuracy minus that of the homogeneous smallest model, in points."""

    @property
    def ranked(self) -> bool:
        """Whether it is a method and has results; references are not ranked."""
        return bool(self.rows) and (self.method not in METHODS or METHODS[self.method].kind != "reference")

    @property
    def reduced(self) -> bool:
        """Whether the runs have fewer rounds than the setting."""
        return self.rounds < self.whole_rounds

    @property
    def over_budget(self) -> bool:
        """Whether its clients hold or see more than their levels allow."""
        return any(row.over_budget for row in self.rows)

    @property
    def verdict(self) -> str:
        """``better`` or ``worse`` than the base, or ``undecided``."""
        if self.against_base is None or self.p >= LEVEL:
            return "undecided"
        return "better" if self.against_base.mean > 0 else "worse"

    def mean(self, value: Value) -> float | None:
        """Return the mean of a value over seeds; None if a seed has none."""
        values = [value(row) for row in self.rows]
        present = [number for number in values if number is not None]
        return fmean(present) if present and len(present) == len(values) else None

    @property
    def accuracy(self) -> float:
        """The mean accuracy over seeds; -1 if no run finished."""
        mean = self.mean(lambda row: row.accuracy)
        return -1.0 if mean is None else mean


def leaderboard(results: RefereeResults) -> list[Entry]:
    """Return the entries by setting and rounds, in the order of the file, the most accurate of a setting first."""
    groups: dict[tuple[str, int], dict[str, list[RefereeRow]]] = {}
    for row in results.rows:
        if row.seed != HELD_OUT:
            groups.setdefault((row.setting, row.rounds), {}).setdefault(row.method, []).append(row)
    entries: list[Entry] = []
    for (setting, rounds), methods in groups.items():
        whole = int(results.settings[setting]["training"]["rounds"])
        entries += _compared([_entry(setting, rounds, whole, method, rows) for method, rows in methods.items()])
    return entries


def _entry(setting: str, rounds: int, whole: int, method: str, rows: Sequence[RefereeRow]) -> Entry:
    finished = tuple(sorted((row for row in rows if not row.error), key=lambda row: row.seed))
    return Entry(setting, rounds, whole, method, finished, tuple(row.error for row in rows if row.error))


def _compared(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries of one setting, compared with the base and the smallest model, the most accurate first."""
    by_method = {entry.method: entry for entry in entries}
    base, smallest = by_method.get(BASE), by_method.get(SMALLEST)
    compared = [
        replace(
            entry,
            against_base=_difference(entry, base) if entry.ranked else None,
            gain=_difference(entry, smallest),
        )
        for entry in entries
    ]
    corrected = iter(holm([entry.against_base.p for entry in compared if entry.against_base]))
    compared = [replace(entry, p=next(corrected)) if entry.against_base else entry for entry in compared]
    return sorted(compared, key=lambda entry: -entry.accuracy)


def _difference(entry: Entry, other: Entry | None) -> Difference | None:
    """Return the difference of accuracies in points, paired by seed; None if there are fewer than two pairs."""
    if other is None or other.method == entry.method:
        return None
    ours, theirs = ({row.seed: 100 * (row.accuracy or 0.0) for row in one.rows} for one in (entry, other))
    seeds = sorted(ours.keys() & theirs.keys())
    return paired([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]) if len(seeds) > 1 else None
