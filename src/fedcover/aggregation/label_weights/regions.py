"""The weights of each region's holders, and the distance of their labels from the population's."""

import math
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
    """A region, the weights of its holders, and the distance of their labels from the population's."""

    region: Region
    weights: tuple[float, ...]
    """One weight for each holder."""
    before: float
    """The total variation distance with uniform weights."""
    after: float
    """The total variation distance with these weights."""


class EntryWeights(Mapping[str, Tensor]):
    """One client's weight in each entry, by tensor; a scalar where no mask prunes the tensor.

    Tensors are created on access, so that a cohort's weights take no more memory than one client's.
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

    holder_sets: HolderSets
    table: Tensor
    """The weight of each client (rows) in the entries of each set (columns), 0 outside it."""
    distances: Tensor
    """For each set the total variation distance with uniform weights and with these; 0 for the set without holders."""

    @cached_property
    def clients(self) -> tuple[EntryWeights, ...]:
        """For each client the weight of each entry by tensor, 0 outside its mask."""
        return tuple(EntryWeights(self.holder_sets.parts, row) for row in self.table)

    @cached_property
    def regions(self) -> tuple[RegionBalance, ...]:
        """The regions that have holders, the largest first."""
        table, distances = self.table.T.cpu(), self.distances.tolist()
        balances = [
            RegionBalance(region, tuple(table[number, list(region.holders)].tolist()), *distances[number])
            for number, region in enumerate(regions_of(self.holder_sets))
            if region.holders
        ]
        return tuple(sorted(balances, key=lambda balance: (-balance.region.size, balance.region.holders)))

    @property
    def before(self) -> float:
        """The mean distance with uniform weights over all entries that have holders."""
        return self._mean(0)

    @property
    def after(self) -> float:
        """The mean distance with these weights over all entries that have holders."""
        return self._mean(1)

    def bias(self) -> dict[str, float]:
        """Return the mean label bias before and after weighting, the worst region's, and that region's share."""
        worst, sizes = int(self.distances[:, 1].argmax()), self.holder_sets.sizes
        return {
            "before": self.before,
            "after": self.after,
            "worst": float(self.distances[worst, 1]),
            "worst_share": float(sizes[worst]) / max(1, int(sizes.sum())),
        }

    def _mean(self, column: int) -> float:
        sizes = self.holder_sets.sizes * self.holder_sets.members.any(1)
        return float((sizes * self.distances[:, column]).sum()) / max(1, int(sizes.sum()))


def region_weights(
    masks: Sequence[Mask],
    theta: Params,
    mixes: Tensor,
    target: Tensor,
    ridge: float = RIDGE,
    most: float = math.inf,
) -> Balance:
    """Return for each region the weights of its holders that bring their labels nearest to the target.

    Each set of holders is solved once, and many sets are solved together: 160,000 sets of 50 out of 100 clients take
    some seconds, and little memory beyond the weights themselves.

    Args:
        masks: The mask of each client.
        theta: The full model, which gives names and shapes.
        mixes: The label distribution of each client, one row per mask.
        target: The label distribution of the population.
        ridge: See ``nearest_weights``.
        most: The largest weight of a holder, as a multiple of an equal share, since a client may report any labels.

    >>> theta, first = {"w": torch.zeros(3)}, {"w": torch.tensor([True, False, True])}
    >>> balance = region_weights([{}, first], theta, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.75, 0.25]))
    >>> [(each.region.holders, each.before, round(each.after, 6)) for each in balance.regions]
    [((0, 1), 0.25, 0.0), ((0,), 0.25, 0.25)]
    >>> balance.clients[1]["w"].round(decimals=6).tolist()
    [0.25, 0.0, 0.25]
    """
    sets = holder_sets(masks, theta)
    solver = SetSolver(mixes, target, ridge)
    table = torch.zeros(len(masks), len(sets.sizes), dtype=torch.float64)
    distances = torch.zeros(len(sets.sizes), 2, dtype=torch.float64)
    for numbers in sets.members.any(1).nonzero().flatten().split(solver.rows):
        members = sets.members[numbers]
        uniform = members / members.sum(1, keepdim=True, dtype=torch.float64)
        weights = _limited(solver.weights(members), uniform, most)
        table[:, numbers] = weights.T
        for column, mixture in enumerate((uniform, weights)):
            distances[numbers, column] = (mixture @ solver.mixes - solver.target).abs().sum(1) / 2
    device = next((tensor.device for tensor in theta.values()), table.device)
    return Balance(sets, table.to(device), distances)


def _limited(weights: Tensor, uniform: Tensor, most: float) -> Tensor:
    """Return weights between these and uniform ones, such that the largest of each row is ``most`` times uniform."""
    if most == math.inf:
        return weights
    share = uniform.amax(1, keepdim=True)
    excess = (weights.amax(1, keepdim=True) - share).clamp_min(1e-300)
    return uniform + ((most - 1) * share / excess).clamp_max(1.0) * (weights - uniform)
