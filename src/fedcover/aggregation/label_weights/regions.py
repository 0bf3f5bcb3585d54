"""For each region the weights of its holders, and how far from the population's labels they must stay."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedcover.aggregation.label_weights.batch_solver import SetSolver
from fedcover.aggregation.label_weights.solver import RIDGE
from fedcover.masks.coverage import Region, regions_of
from fedcover.masks.holders import HolderSets, holder_sets
from fedcover.params import Mask, Params


@dataclass(frozen=True)
class RegionBalance:
    """A region, the weights of its holders, and how far their labels are from the population's."""

    region: Region
    weights: tuple[float, ...]
    """One for each of the region's holders."""
    before: float
    """The total variation left with uniform weights."""
    after: float
    """The same with these weights."""


class EntryWeights(Mapping[str, Tensor]):
    """One client's weight in each entry, by tensor; a scalar where no mask cuts the tensor.

    It is read off a table when asked for, so that a cohort's weights take no more memory than one client's.
    """

    def __init__(self, parts: Mapping[str, Tensor], row: Tensor) -> None:
        self._parts, self._row = parts, row

    def __getitem__(self, name: str) -> Tensor:
        part = self._parts[name]
        return self._row.to(part.device).index_select(0, part.flatten()).view(part.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


@dataclass(frozen=True)
class Balance:
    """The weights of a cohort, by the sets of clients that hold entries in common."""

    held: HolderSets
    table: Tensor
    """The weight of each client (rows) in the entries of each set (columns), 0 outside it."""
    distances: Tensor
    """For each set the total variation left with uniform weights, and with these; 0 for the entries of nobody."""

    @cached_property
    def clients(self) -> tuple[EntryWeights, ...]:
        """For each client a mapping from tensor name to its weight in each entry, 0 outside its mask."""
        return tuple(EntryWeights(self.held.parts, row) for row in self.table)

    @cached_property
    def regions(self) -> tuple[RegionBalance, ...]:
        """Region by region, the largest first; regions that nobody holds are left out."""
        table, distances = self.table.T.cpu(), self.distances.tolist()
        found = [
            RegionBalance(region, tuple(table[number, list(region.holders)].tolist()), *distances[number])
            for number, region in enumerate(regions_of(self.held))
            if region.holders
        ]
        return tuple(sorted(found, key=lambda one: (-one.region.size, one.region.holders)))

    @property
    def before(self) -> float:
        """The mean distance with uniform weights over all held entries."""
        return self._mean(0)

    @property
    def after(self) -> float:
        """The mean distance with these weights over all held entries."""
        return self._mean(1)

    def bias(self) -> dict[str, float]:
        """The labels' bias: its means before and after, what is left in the worst region, and that one's share."""
        worst = int(self.distances[:, 1].argmax())
        share = float(self.held.sizes[worst]) / max(1, int(self.held.sizes.sum()))
        found = {"before": self.before, "after": self.after, "worst": float(self.distances[worst, 1])}
        return {**found, "worst_share": share}

    def _mean(self, column: int) -> float:
        sizes = self.held.sizes * self.held.members.any(1)
        return float((sizes * self.distances[:, column]).sum()) / max(1, int(sizes.sum()))


def region_weights(
    masks: Sequence[Mask],
    theta: Params,
    mixes: Tensor,
    target: Tensor,
    ridge: float = RIDGE,
) -> Balance:
    """For each region the weights of its holders that bring their labels nearest to the target.

    ``mixes`` has one row for each mask. Each set of holders is solved once, many at a time: 160,000 sets of 50 out of
    100 clients take some seconds, and beside the weights themselves little memory.

    >>> theta, first = {"w": torch.zeros(3)}, {"w": torch.tensor([True, False, True])}
    >>> found = region_weights([{}, first], theta, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.75, 0.25]))
    >>> [(one.region.holders, one.before, round(one.after, 6)) for one in found.regions]
    [((0, 1), 0.25, 0.0), ((0,), 0.25, 0.25)]
    >>> found.clients[1]["w"].round(decimals=6).tolist()
    [0.25, 0.0, 0.25]
    """
    held = holder_sets(masks, theta)
    solver = SetSolver(mixes, target, ridge)
    table = torch.zeros(len(masks), len(held.sizes), dtype=torch.float64)
    distances = torch.zeros(len(held.sizes), 2, dtype=torch.float64)
    for numbers in held.members.any(1).nonzero().flatten().split(solver.rows):
        members = held.members[numbers]
        weights = solver.weights(members)
        table[:, numbers] = weights.T
        for column, some in enumerate((members / members.sum(1, keepdim=True, dtype=torch.float64), weights)):
            distances[numbers, column] = (some @ solver.mixes - solver.target).abs().sum(1) / 2
    device = next((tensor.device for tensor in theta.values()), table.device)
    return Balance(held, table.to(device), distances)
