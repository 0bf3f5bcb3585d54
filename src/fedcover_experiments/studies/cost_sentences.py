"""Three sentences about the map of costs, and the search for the setting where complements lose most to pruning."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedcover.calibration.cost_map import RESOURCES, CostMap, MappedSetting, pareto_front
from fedcover.report.format import rough_percent, signed
from fedcover.report.statistics import Difference, holm, paired
from fedcover_experiments.runner import SPLIT_TITLES
from fedcover_experiments.studies.costs import ZERO

SHARE = 0.25
"""The share of a full client's cost that the first sentence is about."""
BY_LABELS = ("HeteroFL",)
"""Masks that are not compared in the search: they change averages by labels too, and only with zeros."""


@dataclass(frozen=True)
class CostComparison:
    """A pruned setting, and the most accurate one with a complement that costs at most as much of one resource."""

    resource: str
    pruned: MappedSetting
    other: MappedSetting
    loss: float
    """How much more accurate the pruned setting is, in points."""
    test: Difference | None
    """The same, paired by seed; None if there are fewer than two seeds."""
    p: float = 1.0
    """After Holm's correction over all comparisons."""

    def as_dict(self) -> dict[str, Any]:
        """Return this comparison as plain data, for JSON."""
        return asdict(self)


def comparisons(costs: CostMap) -> list[CostComparison]:
    """Return all comparisons of pruning with complements at equal cost, the largest loss of a complement first.

    For every split and resource, each setting on the front of pruned models is compared with the most accurate setting
    whose clients see the whole model and that costs at most as much of that resource, if there is one.
    """
    pairs = [
        _compared(resource, pruned, best)
        for split in costs.full
        for resource in RESOURCES
        for pruned in pareto_front(_pruned(costs, split), resource)
        if (best := _best_within(_seeing(costs, split), resource, pruned.costs[resource]))
    ]
    tested = [pair for pair in pairs if pair.test]
    corrected = iter(holm([pair.test.p for pair in tested if pair.test]))
    pairs = [replace(pair, p=next(corrected)) if pair.test else pair for pair in pairs]
    return sorted(pairs, key=lambda pair: -pair.loss)


def _pruned(costs: CostMap, split: str) -> list[MappedSetting]:
    return [s for s in costs.of_split(split) if s.complement == ZERO and s.masks not in BY_LABELS]


def _seeing(costs: CostMap, split: str) -> list[MappedSetting]:
    return [s for s in costs.of_split(split) if s.complement != ZERO]


def _best_within(settings: Sequence[MappedSetting], resource: str, share: float) -> MappedSetting | None:
    affordable = [setting for setting in settings if setting.costs[resource] <= share]
    return max(affordable, key=lambda setting: setting.accuracy, default=None)


def _compared(resource: str, pruned: MappedSetting, other: MappedSetting) -> CostComparison:
    seeds = sorted(pruned.accuracies.keys() & other.accuracies.keys(), key=int)
    first, second = ([setting.accuracies[seed] for seed in seeds] for setting in (pruned, other))
    test = paired(first, second) if len(seeds) > 1 else None
    return CostComparison(resource, pruned, other, pruned.accuracy - other.accuracy, test)


def sentences(costs: CostMap) -> list[str]:
    """Return three sentences: the best at a quarter of each cost, the complements on the fronts, where they lose."""
    return [
        "; ".join(_best_at_share(costs, split) for split in costs.full) + ".",
        "; ".join(_members_of_fronts(costs, split) for split in costs.full) + ".",
        _failure(costs),
    ]


def _best_at_share(costs: CostMap, split: str) -> str:
    """Return the best setting for each resource with a quarter of a full client's cost."""
    parts = []
    for resource in RESOURCES:
        best = _best_within(costs.of_split(split), resource, SHARE)
        whose = f"{resource} the best is" if resource == "compute" else f"its {resource}"
        parts.append(f"{whose} {f'{best.title} ({best.accuracy:.1f} %)' if best else 'none'}")
    head = f"{SPLIT_TITLES[split]}, full FedAvg reaches {costs.full_accuracy(split):.1f} %"
    return f"{head}; with at most {rough_percent(SHARE)} of a full client's {', of '.join(parts)}"


def _members_of_fronts(costs: CostMap, split: str) -> str:
    """Return how many settings of each complement are on the front of each resource."""
    parts = []
    for resource in RESOURCES:
        kinds = Counter(setting.complement for setting in costs.front(split, resource))
        verb = " are" if resource == "compute" else ""
        parts.append(f"{resource}{verb} " + " and ".join(f"{number} {kind}" for kind, number in kinds.items()))
    return f"{SPLIT_TITLES[split]}, the settings on the front of {', of '.join(parts)}"


def _failure(costs: CostMap) -> str:
    """Return where complements lose most to pruned models at equal cost, and what they cost at least."""
    pairs = comparisons(costs)
    seeing = [setting for split in costs.full for setting in _seeing(costs, split)]
    if not seeing:
        return "No complement was run that pruned models could be compared with."
    least = {resource: rough_percent(min(s.costs[resource] for s in seeing)) for resource in RESOURCES}
    floor = "complements cost at least " + ", ".join(f"{share} of {name}" for name, share in least.items())
    if not pairs or pairs[0].loss <= 0:
        return f"Complements lose to pruned models at equal cost in none of {_number(pairs)}; {floor}."
    worst = pairs[0]
    split, share = SPLIT_TITLES[worst.pruned.split], rough_percent(worst.pruned.costs[worst.resource])
    return (
        f"Complements lose most where {worst.resource} is scarce ({split}): with {share} of a full client's,"
        f" {worst.pruned.title} reaches {worst.pruned.accuracy:.1f} %, and the best complement that costs no more,"
        f" {worst.other.title}, {worst.other.accuracy:.1f} %, {_significance(worst, _number(pairs))}; {floor}."
    )


def _number(pairs: Sequence[CostComparison]) -> str:
    return "1 comparison" if len(pairs) == 1 else f"{len(pairs)} comparisons"


def _significance(worst: CostComparison, number: str) -> str:
    if worst.test is None:
        return f"{worst.loss:.1f} points less, the most of {number}, without a test for a single seed"
    low, high = signed(worst.test.low, 1), signed(worst.test.high, 1)
    return (
        f"{worst.loss:.1f} points less, 95 % interval [{low}, {high}], p = {worst.p:.2g} after Holm's correction over"
        f" {number}"
    )
