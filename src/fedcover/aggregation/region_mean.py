"""The mean of client updates region by region, as a stream.

An entry's new value is the weighted mean over the clients that hold it,

    theta'_i = sum_n w_n m_{n,i} theta_{n,i} / sum_n w_n m_{n,i}.

An entry without a holder keeps its old value, bit for bit. Two running sums are kept for each entry, so memory does not
grow with the cohort.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import Mask, Params, all_finite

WEIGHTINGS = ("uniform", "examples", "labels")
NOT_FINITE = "its trained values are not all finite"
"""The reason for which an update that is not finite is rejected, whatever the engine."""


def check_weighting(weighting: str) -> None:
    """Raise InputError unless this names a way to weight the clients of a region."""
    if weighting not in WEIGHTINGS:
        raise InputError(f"weighting must be one of {', '.join(WEIGHTINGS)}; got '{weighting}'")


@dataclass(frozen=True)
class ClientUpdate:
    """The result of one client's training; only values inside its mask count."""

    client: int
    """The client's index in the population."""
    theta: Params
    """Its trained values."""
    mask: Mask
    """The entries that it holds."""
    examples: int = 1
    """The number of its training examples."""
    train_loss: float = float("nan")
    finite: bool | None = None
    """Whether all trained values are finite; None if not checked yet."""
    weights: Mapping[str, Tensor] | None = None
    """The weight of each entry in the mean, 0 or more, by tensor; a scalar applies to a whole tensor.

    None gives all entries of the client the same weight."""
    report: Params | None = None
    """The gradient report: the sum over steps of the squared gradient of every entry, if the training options request
    one."""

    def is_finite(self) -> bool:
        """Return whether all values inside the mask are finite."""
        return all_finite(self.theta, self.mask) if self.finite is None else self.finite


class RegionSum:
    """A running mean of updates over each region.

    Sums are in double precision, so the order of clients affects the result only by rounding.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        weighting: ``"uniform"`` gives all holders of a region the same weight, ``"examples"`` weights them by their
            number of examples, and ``"labels"`` uses each update's own ``weights``.

    >>> total = RegionSum({"w": torch.tensor([5.0, 7.0])})
    >>> total.add(ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}))
    >>> total.mean()["w"].tolist()
    [1.0, 7.0]
    """

    def __init__(self, theta: Params, weighting: str = "uniform") -> None:
        check_weighting(weighting)
        self._theta = theta
        self._by_examples = weighting == "examples"
        self._sum: dict[str, Tensor] = {k: torch.zeros_like(t, dtype=torch.float64) for k, t in theta.items()}
        self._weight: dict[str, Tensor] = {k: torch.zeros_like(t, dtype=torch.float64) for k, t in theta.items()}

    def add(self, update: ClientUpdate) -> None:
        """Add one client; values outside its mask have no influence, not even if they are NaN."""
        if update.weights is not None:
            return self._add_weighted(update, update.weights)
        weight = float(update.examples) if self._by_examples else 1.0
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
        if len(updates) == 1 or any(update.weights is not None for update in updates):
            for update in updates:
                self.add(update)
            return
        shares = [float(update.examples) if self._by_examples else 1.0 for update in updates]
        equal = len(set(shares)) == 1
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
            values, weight = update.theta[name].to(total), weights[name].to(total)
            if name in update.mask:
                kept = update.mask[name].to(total.device)
                values, weight = torch.where(kept, values, 0.0), torch.where(kept, weight, 0.0)
            total.addcmul_(values, weight)
            self._weight[name].add_(weight)

    def mean(self) -> Params:
        """Return the new theta."""
        new = {}
        for name, old in self._theta.items():
            weight = self._weight[name]
            new[name] = torch.where(weight > 0, (self._sum[name] / weight.clamp_min(1e-300)).to(old.dtype), old)
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


def average(theta: Params, updates: Iterable[ClientUpdate], weighting: str = "uniform") -> Params:
    """Return the mean of updates over each region, bit-identical for any order of the updates.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        updates: The clients' updates.
        weighting: See ``RegionSum``.

    >>> update = ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])})
    >>> average({"w": torch.tensor([5.0, 7.0])}, [update])["w"].tolist()
    [1.0, 7.0]
    """
    total = RegionSum(theta, weighting)
    for update in sorted(updates, key=lambda u: u.client):
        total.add(update)
    return total.mean()
