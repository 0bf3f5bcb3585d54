"""L, sigma^2 and G guessed from what a round computes anyway: no gradient is evaluated for it.

All rests on the pseudo-gradient of a client inside its mask, g_n = (theta_q o m_n - theta_n) / reach. It is the mean
of the client's T stochastic gradients (with momentum a weighted mean, whose weights ``Steps`` knows).
Cost: a few operations for each entry of each update, and in a round four doubles of memory for each parameter, whatever
the cohort; from one round to the next a number of single precision is kept. None of the three is a bound: the
assumptions speak of all points, a run sees those that it visits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcover.aggregate import ClientUpdate
from fedcover.errors import InputError, check_whole
from fedcover.params import Params, numbers
from fedcover.theory.bounds import Constants, Steps


class Spread:
    """Running sums over a round's pseudo-gradients; memory does not grow with the cohort."""

    def __init__(self, theta: Params) -> None:
        self._theta = theta
        self._sum, self._squares, self._held = (
            {name: torch.zeros_like(t, dtype=torch.float64) for name, t in theta.items()} for _ in range(3)
        )
        self._norms: list[Tensor] = []
        self._averaging: list[float] = []

    def add(self, update: ClientUpdate, steps: Steps) -> None:
        """Take in one client, which took these steps."""
        norm = next(iter(self._sum.values())).new_zeros(())
        for name, theta in self._theta.items():
            moved = (theta.double() - update.theta[name].to(theta.device).double()) / steps.reach
            if name in update.mask:
                kept = update.mask[name].to(theta.device)
                moved = torch.where(kept, moved, 0.0)
                self._held[name].add_(kept)
            else:
                self._held[name].add_(1.0)
            square = moved.square()
            self._sum[name].add_(moved)
            self._squares[name].add_(square)
            norm = norm + square.sum()
        self._norms.append(norm)
        self._averaging.append(steps.averaging)

    def summary(self) -> "Summary":
        """What the round says of gradients and their noise."""
        if not self._norms:
            raise InputError("no update was added; add the updates of the round first")
        mean, parts = {}, []
        for name, total in self._sum.items():
            held = self._held[name]
            mean[name] = total / held.clamp_min(1.0)
            # Sample variance of each entry over its holders; one holder alone tells nothing.
            shared = held >= 2
            around = (self._squares[name] - total * mean[name]).clamp_min(0.0) / (held - 1).clamp_min(1.0)
            around = torch.where(shared, around, 0.0)
            parts += [around.sum(), (around / held.clamp_min(1.0)).sum(), (held > 0).sum().double()]
            parts += [shared.sum().double()]
        found = numbers([*parts, *self._norms])
        each, averaged, seen, shared_entries = (sum(found[i : len(parts) : 4]) for i in range(4))
        scale = seen / shared_entries if shared_entries else 0.0
        return Summary(
            mean, {name: held > 0 for name, held in self._held.items()}, each * scale, averaged * scale,
            max(found[len(parts) :]), sum(self._averaging) / len(self._averaging), bool(shared_entries),
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """One round's pseudo-gradients in brief."""

    mean: Params
    """Their region average: what moved theta."""
    held: dict[str, Tensor]
    each: float
    """Variance of one client's pseudo-gradient, summed over entries."""
    averaged: float
    """Variance of the region average, summed over entries."""
    largest: float
    """Largest squared norm of a pseudo-gradient."""
    averaging: float
    """What local averaging leaves of the variance of one gradient: 1/T without momentum."""
    shared: bool
    """Whether any entry had two holders, without whom there is no spread."""


class Estimate:
    """Guesses of L, sigma^2 and G, better with every round.

    * ``variance``, sigma^2 of one stochastic gradient: the sample variance of the pseudo-gradients over the holders
      of each entry, summed over entries, times T, which undoes the averaging over local steps; mean over rounds.
      Entries with one holder count as the mean of the others. It measures whatever sets clients apart: different
      masks and different data come on top of noise, times T, so under non-IID data it can be far too large.
    * ``averaged``, the same for the region average: each entry's variance divided by its coverage. It estimates what
      N sigma^2 / Gamma^2 and K sigma^2 bound, and is often much smaller than both.
    * ``gradient``, G: the largest squared norm of any client's pseudo-gradient, plus the noise that its averaging
      took away. The mean of gradients along a path is shorter than the longest of them: rather too small.
    * ``smoothness``, L: the largest secant ||g_{q+1} - g_q|| / ||theta_{q+1} - theta_q|| of region averages, of whose
      square the variance of both is taken off. A pair of rounds of which more than half is noise is passed over. It
      sees curvature along the path alone, and none above 1 / reach: rather too small, but large enough to
      show that a step size breaks gamma <= 1/(6 L T). Masks that change between rounds can make it too large.

    A client that goes E times over its data sees each batch E times, which is not E times as much averaging: give
    ``passes`` = E.
    """

    def __init__(self, passes: int = 1) -> None:
        check_whole("passes", passes, 1)
        self._passes = passes
        self.rounds = 0
        self.smoothness: float | None = None
        """None until two rounds in a row differ by more than noise."""
        self.gradient: float | None = None
        self.variance: float | None = None
        """sigma^2 of Assumption 4; None until an entry had two holders."""
        self.averaged: float | None = None
        """The variance of the region average of one gradient from each holder, summed over regions."""
        self._shared = 0
        self.last: Summary | None = None
        self.ways = torch.zeros(0, dtype=torch.float64)
        """How far theta moved in the last round: the sum of squares for each tensor."""

    @classmethod
    def resumed(
        cls, passes: int, rounds: int, shared: int, guesses: Sequence[float | None], last: Summary, ways: Tensor
    ) -> "Estimate":
        """An estimate as it stood: rounds so far, those with shared entries, L, G, sigma^2 and its average."""
        estimate = cls(passes)
        estimate.rounds, estimate._shared = rounds, shared
        estimate.smoothness, estimate.gradient, estimate.variance, estimate.averaged = guesses
        estimate.last, estimate.ways = last, ways
        return estimate

    @property
    def shared(self) -> int:
        """In how many rounds an entry had two holders."""
        return self._shared

    def round(
        self, theta: Params, updates: Iterable[ClientUpdate], steps: Steps | Sequence[Steps], new_theta: Params
    ) -> None:
        """Take in one round: theta_q, its updates, the steps of all or of each, and theta_{q+1}."""
        updates = list(updates)
        each = [steps] * len(updates) if isinstance(steps, Steps) else steps
        spread = Spread(theta)
        for update, taken in zip(updates, each, strict=True):
            spread.add(update, taken)
        self.add(theta, spread, new_theta)

    def add(self, theta: Params, spread: Spread, new_theta: Params) -> None:
        """Take in a round whose updates were streamed into a ``Spread``."""
        now = spread.summary()
        fresh = min(1.0, self._passes * now.averaging)
        if now.shared:
            self._shared += 1  # a running mean
            self.variance = _toward(self.variance, now.each / fresh, self._shared)
            self.averaged = _toward(self.averaged, now.averaged / fresh, self._shared)
        lost = (1 - fresh) * (self.variance or 0.0)
        self.gradient = max(self.gradient or 0.0, now.largest + lost)
        if self.last is not None:
            secant = self._secant(self.last, now)
            self.smoothness = secant if self.smoothness is None else max(self.smoothness, secant or 0.0)
        # Single precision is enough for what comes from single values, and a checkpoint is smaller; it is rounded here,
        # so that a run that goes on has what a resumed one reads.
        kept = {name: mean.to(torch.promote_types(theta[name].dtype, torch.float32)) for name, mean in now.mean.items()}
        self.last = replace(now, mean=kept)
        self.ways = torch.stack([(new_theta[k].double() - t.double()).square().sum() for k, t in theta.items()])
        self.rounds += 1

    def _secant(self, before: Summary, now: Summary) -> float | None:
        """How much the average gradient changed for each unit that theta moved; None if noise may have done it."""
        changes = []
        for name, mean in now.mean.items():
            both = before.held[name] & now.held[name]
            changes.append(torch.where(both, mean - before.mean[name], 0.0).square().sum())
        found = numbers([*changes, *self.ways])
        change, way = sum(found[: len(changes)]), sum(found[len(changes) :])
        noise = before.averaged + now.averaged
        if not way or not (before.shared and now.shared) or change <= 2 * noise:
            return None
        return float(((change - noise) / way) ** 0.5)

    def constants(self, gap: float, regions: int | None = None) -> Constants | None:
        """The guesses as the theorems' constants, or None as long as one is missing.

        ``gap`` is F(theta_1) - F_inf; a loss at the start, if losses are never negative, is not below it. With
        ``regions``, K, sigma^2 is Assumption 5's: that of the average of one region, for which K sigma^2 is the
        measured sum over regions.
        """
        check_whole("regions", 1 if regions is None else regions, 1)
        noise = self.variance if regions is None or self.averaged is None else self.averaged / regions
        if self.smoothness is None or noise is None or self.gradient is None:
            return None
        return Constants(self.smoothness, noise, self.gradient, gap, estimated=True)


def _toward(mean: float | None, value: float, count: int) -> float:
    """The mean of ``count`` values, of which this is the last."""
    return value if mean is None else mean + (value - mean) / count
