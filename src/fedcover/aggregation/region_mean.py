"""Averaging region by region, as a stream: two running sums for each entry.

An entry's new value is the weighted mean over the clients that hold it; an entry that nobody holds
keeps its old value, bit for bit. Memory does not grow with the cohort.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import Mask, Params, all_finite

WEIGHTINGS = ("uniform", "examples", "labels")


def check_weighting(weighting: str) -> None:
    """Nothing, or an error that names the ways in which a region's clients can be weighted."""
    if weighting not in WEIGHTINGS:
        raise InputError(f"weighting must be one of {', '.join(WEIGHTINGS)}; got '{weighting}'")


@dataclass(frozen=True)
class ClientUpdate:
    """What a client sends back: its trained values, of which only those inside its mask count."""

    client: int
    theta: Params
    mask: Mask
    examples: int = 1
    train_loss: float = float("nan")
    finite: bool | None = None
    """Whether all its trained values are finite; None if nobody has looked."""
    weights: Mapping[str, Tensor] | None = None
    """What each entry counts for in the average, 0 or more, by tensor (one number may stand for a whole tensor);
    None if all its entries count alike."""
    report: Params | None = None
    """The sum over its steps of the squared gradients of all entries, if its drill asked for it."""

    def is_finite(self) -> bool:
        """Whether all values inside the mask are finite."""
        return all_finite(self.theta, self.mask) if self.finite is None else self.finite


class RegionSum:
    """A running region average.

    Sums are in double precision, so that the order of clients changes the result by rounding at most.

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
        """Take in one client; what it holds outside its mask has no influence, not even as NaN."""
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
        """Take in several clients at once: fewer and larger operations, for which a GPU is made."""
        if len(updates) == 1 or any(update.weights is not None for update in updates):
            for update in updates:
                self.add(update)
            return
        shares = [float(update.examples) if self._by_examples else 1.0 for update in updates]
        alike = len(set(shares)) == 1
        for name, total in self._sum.items():
            values = torch.stack([update.theta[name] for update in updates])
            share = 1.0 if alike else total.new_tensor(shares).view(-1, *[1] * total.ndim)
            if any(name in update.mask for update in updates):
                whole = torch.ones_like(total, dtype=torch.bool)
                kept = torch.stack([update.mask.get(name, whole) for update in updates])
                held = torch.where(kept, values, 0.0)
                values, weight = (held, kept) if alike else (held * share, kept * share)
                self._weight[name].add_(weight.sum(0, dtype=torch.float64), alpha=shares[0] if alike else 1.0)
            else:
                values = values if alike else values * share
                self._weight[name].add_(sum(shares))
            total.add_(values.sum(0, dtype=torch.float64), alpha=shares[0] if alike else 1.0)

    def _add_weighted(self, update: ClientUpdate, weights: Mapping[str, Tensor]) -> None:
        for name, total in self._sum.items():
            values, weight = update.theta[name].to(total), weights[name].to(total)
            if name in update.mask:
                kept = update.mask[name].to(total.device)
                values, weight = torch.where(kept, values, 0.0), torch.where(kept, weight, 0.0)
            total.addcmul_(values, weight)
            self._weight[name].add_(weight)

    def mean(self) -> Params:
        """The new theta."""
        new = {}
        for name, old in self._theta.items():
            weight = self._weight[name]
            held = weight > 0
            new[name] = torch.where(held, (self._sum[name] / weight.clamp_min(1e-300)).to(old.dtype), old)
        return new


def step_towards(theta: Params, mean: Params, step: float) -> Params:
    """theta + step (mean - theta); what the mean left as it was stays, bit for bit, and a step of 1 is the mean.

    >>> step_towards({"w": torch.tensor([0.0, 5.0])}, {"w": torch.tensor([2.0, 5.0])}, 0.5)["w"].tolist()
    [1.0, 5.0]
    """
    if step == 1.0:
        return mean
    return {k: torch.where(mean[k] == old, old, old + step * (mean[k] - old)) for k, old in theta.items()}


def average(theta: Params, updates: Iterable[ClientUpdate], weighting: str = "uniform") -> Params:
    """The region average of a batch of updates, the same bits for any order of them."""
    total = RegionSum(theta, weighting)
    for update in sorted(updates, key=lambda u: u.client):
        total.add(update)
    return total.mean()
