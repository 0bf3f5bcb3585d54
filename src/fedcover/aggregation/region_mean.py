"""The mean of client updates region by region, as a stream.

An entry's new value is the weighted mean over the clients that hold it,

    theta'_i = sum_n w_n m_{n,i} theta_{n,i} / sum_n w_n m_{n,i}.

An entry without a holder keeps its old value, bit for bit. Two running sums are kept for each entry, so memory does not
grow with the cohort.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, ClientUpdate
from fedcover.params import Params


class RegionSum(Aggregation):
    """A running mean of updates over each region.

    Sums are in double precision, so the order of clients affects the result only by rounding.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        by_examples: Whether holders are weighted by their number of examples; otherwise all have the same weight. An
            update's own ``weights`` take precedence.
        zero_padded: Whether to divide by all clients and not by the holders, as if a pruned value were a trained 0.

    >>> total = RegionSum({"w": torch.tensor([5.0, 7.0])})
    >>> total.add(ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}))
    >>> total.result()["w"].tolist()
    [1.0, 7.0]
    """

    def __init__(self, theta: Params, by_examples: bool = False, zero_padded: bool = False) -> None:
        self._theta, self._by_examples, self._zero_padded = theta, by_examples, zero_padded
        self._clients = 0.0
        self._sum: dict[str, Tensor] = {k: torch.zeros_like(t, dtype=torch.float64) for k, t in theta.items()}
        self._weight: dict[str, Tensor] = {k: torch.zeros_like(t, dtype=torch.float64) for k, t in theta.items()}

    def add(self, update: ClientUpdate) -> None:
        """Add one client; values outside its mask have no influence, not even if they are NaN."""
        if update.weights is not None:
            return self._add_weighted(update, update.weights)
        weight = (float(update.examples) if self._by_examples else 1.0) * update.discount
        self._clients += weight
        for name, total in self._sum.items():
            values = update.theta[name].to(total)
            if name in update.mask:
                kept = update.mask[name].to(total.device)
                total.add_(torch.where(kept, values, 0.0), alpha=weight)
                self._weight[name].add_(kept, alpha=weight)
            else:
                total.add_(values, alpha=weight)
                self._weight[name].add_(weight)

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients at once, in fewer and larger operations, which suits a GPU."""
        if len(updates) <= 1 or any(update.weights is not None for update in updates):
            for update in updates:
                self.add(update)
            return
        shares = [(float(update.examples) if self._by_examples else 1.0) * update.discount for update in updates]
        equal = len(set(shares)) == 1
        self._clients += sum(shares)
        for name, total in self._sum.items():
            values = torch.stack([update.theta[name] for update in updates])
            share = 1.0 if equal else total.new_tensor(shares).view(-1, *[1] * total.ndim)
            if any(name in update.mask for update in updates):
                all_kept = torch.ones_like(total, dtype=torch.bool)
                kept = torch.stack([update.mask.get(name, all_kept) for update in updates])
                inside = torch.where(kept, values, 0.0)
                values, weight = (inside, kept) if equal else (inside * share, kept * share)
                self._weight[name].add_(weight.sum(0, dtype=torch.float64), alpha=shares[0] if equal else 1.0)
            else:
                values = values if equal else values * share
                self._weight[name].add_(sum(shares))
            total.add_(values.sum(0, dtype=torch.float64), alpha=shares[0] if equal else 1.0)

    def _add_weighted(self, update: ClientUpdate, weights: Mapping[str, Tensor]) -> None:
        for name, total in self._sum.items():
            values, weight = update.theta[name].to(total), weights[name].to(total) * update.discount
            if name in update.mask:
                kept = update.mask[name].to(total.device)
                values, weight = torch.where(kept, values, 0.0), torch.where(kept, weight, 0.0)
            total.addcmul_(values, weight)
            self._weight[name].add_(weight)

    def result(self) -> Params:
        """Return the new theta."""
        new = {}
        for name, old in self._theta.items():
            weight = self._weight[name]
            divisor = self._clients if self._zero_padded else weight.clamp_min(1e-300)
            new[name] = torch.where(weight > 0, (self._sum[name] / divisor).to(old.dtype), old)
        return new


def step_towards(theta: Params, mean: Params, step: float) -> Params:
    """Return theta + step (mean - theta).

    Entries that the mean left unchanged stay bit-identical, and a step of 1 returns the mean itself.

    >>> step_towards({"w": torch.tensor([0.0, 5.0])}, {"w": torch.tensor([2.0, 5.0])}, 0.5)["w"].tolist()
    [1.0, 5.0]
    """
    if step == 1.0:
        return mean
    return {k: torch.where(mean[k] == old, old, old + step * (mean[k] - old)) for k, old in theta.items()}


def average(theta: Params, updates: Iterable[ClientUpdate], by_examples: bool = False) -> Params:
    """Return the mean of updates over each region, bit-identical for any order of the updates.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        updates: The clients' updates.
        by_examples: Whether to weight clients by their number of examples, and not equally.

    >>> update = ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])})
    >>> average({"w": torch.tensor([5.0, 7.0])}, [update])["w"].tolist()
    [1.0, 7.0]
    """
    total = RegionSum(theta, by_examples)
    for update in sorted(updates, key=lambda u: u.client):
        total.add(update)
    return total.result()
