"""For each region the weights of its holders, and how far from the population's labels they must stay."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.balance.weights import RIDGE, nearest_weights
from fedcover.coverage import Region
from fedcover.params import Mask, Params

MOST_SOLVES = 500
"""The most holder sets whose weights are sought in one call: those of the largest regions."""


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
    """One client's weight in each entry, by tensor; a scalar where the tensor is one region.

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
    """The weights of a cohort, region by region; regions that nobody holds are left out."""

    regions: tuple[RegionBalance, ...]
    """Largest first."""
    solved: float
    """The share of held entries in regions whose weights were sought; it is below 1 only with very many regions."""
    clients: tuple[EntryWeights, ...]
    """For each client a mapping from tensor name to its weight in each entry, 0 outside its mask."""

    @property
    def before(self) -> float:
        """The mean distance with uniform weights over all held entries."""
        return self._mean([one.before for one in self.regions])

    @property
    def after(self) -> float:
        """The mean distance with these weights over all held entries."""
        return self._mean([one.after for one in self.regions])

    def _mean(self, distances: Sequence[float]) -> float:
        sizes = [one.region.size for one in self.regions]
        return sum(s * d for s, d in zip(sizes, distances, strict=True)) / max(1, sum(sizes))


def region_weights(
    masks: Sequence[Mask],
    theta: Params,
    mixes: Tensor,
    target: Tensor,
    ridge: float = RIDGE,
    most: int = MOST_SOLVES,
) -> Balance:
    """For each region the weights of its holders that bring their labels nearest to the target.

    ``mixes`` has one row for each mask. Each holder set is solved once, and of more than ``most`` only those
    with most entries; the others weigh alike. Time: entries x distinct masks, and a millisecond a solve.

    >>> theta, first = {"w": torch.zeros(3)}, {"w": torch.tensor([True, False, True])}
    >>> found = region_weights([{}, first], theta, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.75, 0.25]))
    >>> [(one.region.holders, one.before, round(one.after, 6)) for one in found.regions]
    [((0, 1), 0.25, 0.0), ((0,), 0.25, 0.25)]
    >>> found.clients[1]["w"].round(decimals=6).tolist()
    [0.25, 0.0, 0.25]
    """
    mixes, target = mixes.detach().to("cpu", torch.float64), target.detach().to("cpu", torch.float64)
    numbers: dict[tuple[int, ...], int] = {}
    sizes: list[dict[str, int]] = []
    parts: dict[str, Tensor] = {}
    for name, tensor in theta.items():
        holders, part, counts = _parts_of(name, tensor, masks)
        own = [numbers.setdefault(held, len(numbers)) for held in holders]
        sizes += [{} for _ in range(len(numbers) - len(sizes))]
        for number, size in zip(own, counts, strict=True):
            if size:
                sizes[number][name] = size
        found = torch.tensor(own, dtype=torch.int32).to(tensor.device)
        parts[name] = found[0] if len(own) == 1 else found[part].view(tensor.shape)
    regions = [Region(held, sum(sizes[n].values()), sizes[n]) for held, n in numbers.items() if held and sizes[n]]
    regions.sort(key=lambda region: (-region.size, region.holders))
    uniform = torch.zeros(len(regions), len(masks), dtype=torch.float64)
    for row, region in zip(uniform.numpy(), regions, strict=True):
        row[list(region.holders)] = 1 / len(region.holders)
    distances = ((uniform @ mixes - target).abs().sum(1) / 2).tolist()
    table = torch.zeros(len(masks), len(numbers), dtype=torch.float64)
    table[:, [numbers[region.holders] for region in regions]] = uniform.T
    balanced: list[RegionBalance] = []
    for place, (region, before) in enumerate(zip(regions, distances, strict=True)):
        alike = (1 / len(region.holders),) * len(region.holders)
        balanced.append(RegionBalance(region, alike, before, before))
        if place < most and len(region.holders) > 1:
            weights, after = nearest_weights(mixes[list(region.holders)], target, ridge=ridge)
            table[list(region.holders), numbers[region.holders]] = weights
            balanced[-1] = RegionBalance(region, tuple(weights.tolist()), before, after)
    solved = sum(region.size for region in regions[:most]) / max(1, sum(region.size for region in regions))
    if theta:
        table = table.to(next(iter(theta.values())).device)
    return Balance(tuple(balanced), solved, tuple(EntryWeights(parts, row) for row in table))


def _parts_of(name: str, tensor: Tensor, masks: Sequence[Mask]) -> tuple[list[tuple[int, ...]], Tensor, list[int]]:
    """The holders of each part into which the masks cut one tensor, each entry's part, and the parts' sizes."""
    distinct = {id(mask): mask[name] for mask in masks if name in mask}
    part = torch.zeros(tensor.numel(), dtype=torch.long, device=tensor.device)
    counts = torch.tensor([tensor.numel()])
    held = torch.empty(1, 0, dtype=torch.bool)
    for kept in distinct.values():
        # Refine the partition found so far by one mask, and number its parts afresh.
        code = part * 2 + kept.flatten()
        every = torch.bincount(code, minlength=2 * len(counts))
        part = ((every > 0).cumsum(0) - 1)[code]
        every = every.cpu()
        found = every.nonzero().flatten()
        counts, held = every[found], torch.cat([held[found // 2], (found % 2).bool()[:, None]], 1)
    column = {key: place for place, key in enumerate(distinct)}
    columns = [column.get(id(mask) if name in mask else 0, len(distinct)) for mask in masks]
    by_client = torch.cat([held, torch.ones(len(held), 1, dtype=torch.bool)], 1)[:, columns]
    holders = [tuple(place for place, holds in enumerate(row) if holds) for row in by_client.tolist()]
    return holders, part, counts.tolist()
