"""Estimates of L, sigma^2 and G from the updates of rounds, without evaluating further gradients.

They are based on the pseudo-gradient of a client inside its mask, g_n = (theta_q o m_n - theta_n) / reach. It is the
mean of the client's T stochastic gradients, or with momentum a weighted mean, whose weights ``Steps`` has.

Cost: a few operations for each entry of each update. A round takes seven numbers of eight bytes for each parameter,
whatever the cohort, of which 20 bytes are kept for the next round. None of the three estimates is a bound: the
assumptions are about all points, and a run sees only those that it visits.

All three are valid for frozen complements too. Clients then evaluate gradients at theta instead of theta o m_n. Masks
do not add to sigma^2, except through drift, and a change of masks does not move a client's point: the secant of L is
simpler (``whole``).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError, check_whole
from fedcover.params import Params, numbers
from fedcover.seeding import address
from fedcover.theory.bounds import Constants, Steps

COUNT_BITS = (1 << 20) - 1
"""The low bits of an entry's holder code, which count its holders; the others identify them."""
MOST_TURN = 8.0
"""Limit on the movement caused by mask changes, relative to that of theta; L is then at worst three times too small."""


class PseudoGradientSums:
    """Running sums over a round's pseudo-gradients; memory does not grow with the cohort.

    Args:
        theta: theta_q, the model that the clients started from.
    """

    def __init__(self, theta: Params) -> None:
        self._theta = theta
        self._sum, self._squares = (
            {name: torch.zeros_like(t, dtype=torch.float64) for name, t in theta.items()} for _ in range(2)
        )
        self._holders = {name: torch.zeros_like(t, dtype=torch.int64) for name, t in theta.items()}
        self._keys: list[int] = []
        self._norms: list[Tensor] = []
        self._steps: list[Steps] = []

    def add(self, update: ClientUpdate, steps: Steps, place: str = "") -> None:
        """Add one client.

        Args:
            update: The client's update.
            steps: The local steps that it took.
            place: Its place in the cohort. Clients with the same place in two rounds are compared with each other. By
                default the first client is compared with the first, and so on.
        """
        # Sums of such keys, which may overflow, differ for different sets of places, except with odds of 1 to 2^43.
        key = address(0, "place", place or str(len(self._keys))) & ~COUNT_BITS | 1
        norm = next(iter(self._sum.values())).new_zeros(())
        for name, theta in self._theta.items():
            moved = (theta.double() - update.theta[name].to(theta.device).double()) / steps.reach
            if name in update.mask:
                kept = update.mask[name].to(theta.device)
                moved = torch.where(kept, moved, 0.0)
                self._holders[name].add_(kept, alpha=key)
            else:
                self._holders[name].add_(key)
            square = moved.square()
            self._sum[name].add_(moved)
            self._squares[name].add_(square)
            norm = norm + square.sum()
        self._keys.append(key)
        self._norms.append(norm)
        self._steps.append(steps)

    def summary(self) -> "Summary":
        """Return the statistics of the round's gradients and their noise."""
        if not self._norms:
            raise InputError("summary needs at least one update; add the updates of the round first")
        mean, parts = {}, []
        for name, total in self._sum.items():
            count = (self._holders[name] & COUNT_BITS).double()
            mean[name] = total / count.clamp_min(1.0)
            # Sample variance of each entry over its holders; it needs two.
            shared = count >= 2
            variance = (self._squares[name] - total * mean[name]).clamp_min(0.0) / (count - 1).clamp_min(1.0)
            variance = torch.where(shared, variance, 0.0)
            parts += [variance.sum(), (variance / count.clamp_min(1.0)).sum(), (count > 0).sum().double()]
            parts += [shared.sum().double()]
        values = numbers([*parts, *self._norms])
        each, averaged, seen, shared_entries = (sum(values[i : len(parts) : 4]) for i in range(4))
        scale = seen / shared_entries if shared_entries else 0.0
        reach = max(steps.reach for steps in self._steps)
        return Summary(
            mean, self._holders, {name: squares * reach**2 for name, squares in self._squares.items()},
            tuple(self._keys), each * scale, averaged * scale, max(values[len(parts) :]),
            sum(steps.averaging for steps in self._steps) / len(self._steps), bool(shared_entries),
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """Statistics of one round's pseudo-gradients."""

    mean: Params
    """Their mean over each region, which moved theta."""
    holders: dict[str, Tensor]
    """For each entry a code: the number of its holders in the low bits, and a hash of their places in the others."""
    drift: Params
    """For each entry the sum over its holders of the squared distance that it moved."""
    places: tuple[int, ...]
    """The hash of each client's place."""
    each: float
    """The variance of one client's pseudo-gradient, summed over entries."""
    averaged: float
    """The variance of the region mean, summed over entries."""
    largest: float
    """The largest squared norm of a pseudo-gradient."""
    averaging: float
    """The factor by which local averaging lowers the variance of one gradient: 1/T without momentum."""
    shared: bool
    """Whether any entry had two holders; without two there is no sample variance."""
    error: float = 0.0
    """The errors of the clients' complements, summed; 0 if they are frozen, or pruned."""


class Estimate:
    """Estimates of L, sigma^2 and G that improve with every round.

    * ``variance``, sigma^2 of one stochastic gradient: the sample variance of the pseudo-gradients over the holders
      of each entry, summed over entries and multiplied by T, which undoes the averaging over local steps; the mean over
      rounds. Entries with one holder count as the mean of the others. Different masks and different data add to the
      noise, multiplied by T, so with non-IID data the estimate can be far too large.
    * ``averaged``, the same for the region mean: each entry's variance divided by its coverage. It estimates what
      N sigma^2 / Gamma^2 and K sigma^2 bound, and is often much smaller than both.
    * ``gradient``, G: the largest squared norm of any client's pseudo-gradient, plus the noise that averaging removed.
      The mean of gradients along a path is shorter than the longest of them, so the estimate tends to be too small.
    * ``smoothness``, L: the largest secant, that is, the change of the clients' gradients from one round to the next
      divided by the distance between their models; see ``_secant``. Except for noise it is never above L, however masks
      change. It measures curvature only along the path, and none above 1 / reach. So it tends to be too small, but it
      is large enough to show that a step size violates gamma <= 1/(6 L T). Pairs of rounds that differ mostly by noise
      or masks are skipped.

    Args:
        passes: The number of epochs E of local training. A client that makes E passes over its data uses each batch E
            times, which does not average E times as much.
        whole: Whether clients see the whole model, as with frozen complements, rather than a pruned one.
    """

    def __init__(self, passes: int = 1, whole: bool = False) -> None:
        check_whole("passes", passes, 1)
        self._passes, self._whole = passes, whole
        self.rounds = 0
        self.smoothness: float | None = None
        """L; None until two rounds in a row differ by more than noise."""
        self.gradient: float | None = None
        """G; None before the first round."""
        self.variance: float | None = None
        """sigma^2 of Assumption 4; None until an entry has had two holders."""
        self.averaged: float | None = None
        """The variance of the region mean of one gradient from each holder, summed over regions."""
        self.shared = 0
        """The number of rounds in which an entry had two holders."""
        self.last: Summary | None = None
        self.moved: Params = {}

    @classmethod
    def resumed(
        cls,
        passes: int,
        rounds: int,
        shared: int,
        values: Sequence[float | None],
        last: Summary,
        moved: Params,
        whole: bool = False,
    ) -> "Estimate":
        """Return an estimate with the state of an earlier one.

        Args:
            passes: See ``Estimate``.
            rounds: The number of rounds so far.
            shared: The number of rounds in which an entry had two holders.
            values: ``smoothness``, ``gradient``, ``variance`` and ``averaged``.
            last: The statistics of the last round.
            moved: The movement of theta in the last round.
            whole: See ``Estimate``.
        """
        estimate = cls(passes, whole)
        estimate.rounds, estimate.shared = rounds, shared
        estimate.smoothness, estimate.gradient, estimate.variance, estimate.averaged = values
        estimate.last, estimate.moved = last, moved
        return estimate

    def add_round(
        self, theta: Params, updates: Iterable[ClientUpdate], steps: Steps | Sequence[Steps], new_theta: Params
    ) -> None:
        """Add one round.

        Args:
            theta: theta_q, the model before the round.
            updates: The clients' updates.
            steps: The local steps of all clients, or of each.
            new_theta: theta_{q+1}, the model after the round.
        """
        updates = list(updates)
        steps_of_each = [steps] * len(updates) if isinstance(steps, Steps) else steps
        sums = PseudoGradientSums(theta)
        for update, client_steps in zip(updates, steps_of_each, strict=True):
            sums.add(update, client_steps)
        self.add(theta, sums, new_theta)

    def add(self, theta: Params, sums: PseudoGradientSums, new_theta: Params, error: float = 0.0) -> None:
        """Add a round whose updates were streamed into a ``PseudoGradientSums``.

        Args:
            theta: theta_q, the model before the round.
            sums: The sums of its updates.
            new_theta: theta_{q+1}, the model after the round.
            error: The errors of the clients' complements, summed, if clients see the whole model.
        """
        summary = replace(sums.summary(), error=error if self._whole else 0.0)
        averaging = min(1.0, self._passes * summary.averaging)
        if summary.shared:
            self.shared += 1
            self.variance = _running_mean(self.variance, summary.each / averaging, self.shared)
            self.averaged = _running_mean(self.averaged, summary.averaged / averaging, self.shared)
        removed = (1 - averaging) * (self.variance or 0.0)
        self.gradient = max(self.gradient or 0.0, summary.largest + removed)
        if self.last is not None:
            secant = self._secant(self.last, summary, theta)
            self.smoothness = secant if self.smoothness is None else max(self.smoothness, secant or 0.0)
        # Parameters have single precision, so that is enough here, and checkpoints are smaller. Rounding now, and not
        # when a checkpoint is written, keeps an uninterrupted run bit-identical to a resumed one.
        self.last = replace(summary, mean=_single(summary.mean, theta), drift=_single(summary.drift, theta))
        moved = {name: new_theta[name].double() - tensor.double() for name, tensor in theta.items()}
        self.moved = _single(moved, theta)
        self.rounds += 1

    def _secant(self, before: Summary, after: Summary, theta: Params) -> float | None:
        """Return the change of gradients divided by the movement of models; None if noise or masks may explain it.

        Client n evaluates its gradients at theta o m_n, so between two rounds its point moves by more than theta if its
        mask changes: v_n = theta' o m'_n - theta o m_n. Where an entry has the same c holders in both rounds, the
        change d of its mean is the mean of theirs, so

            sum_i c_i d_i^2 <= sum_n ||g'_n - g_n||^2 <= L^2 sum_n ||v_n||^2.

        If the holders of an entry change, at least c + c' - N clients hold it in both rounds. Each of the others
        contributes the square of the entry and that of its drift, both twice, since local steps move the entry after
        it is added or before it is removed.

        If clients see the whole model, v_n = theta' - theta for all of them, plus the complements' errors and, where
        holders change, drift: by Minkowski (sum_n ||v_n||^2)^(1/2) is at most the root of their sums without errors
        plus the roots of the errors of both rounds.
        """
        changes, movements, turns = [], [], []
        clients = len({*before.places, *after.places})
        for name, moved in self.moved.items():
            same = before.holders[name] == after.holders[name]
            old, new = ((each.holders[name] & COUNT_BITS).double() for each in (before, after))
            both = torch.where(same, old, (old + new - clients).clamp_min(0.0))
            added, removed = (new > both) * after.drift[name], (old > both) * before.drift[name]
            if self._whole:
                turn_of_entry = 2 * (added + removed) + torch.where(same, 0.0, clients - both) * moved.square()
                both = torch.full_like(both, clients)
            else:
                values = theta[name].double()
                added = (new - both) * values.square() + added
                removed = (old - both) * (values - moved).square() + removed
                turn_of_entry = 2 * (added + removed)
            changes.append(torch.where(same, old * (after.mean[name] - before.mean[name]).square(), 0.0).sum())
            movements.append((both * moved.square()).sum())
            turns.append(turn_of_entry.sum())
        sums = numbers([*changes, *movements, *turns])
        change, movement, turn = (sum(sums[i : i + len(changes)]) for i in range(0, len(sums), len(changes)))
        turn += _added_by_errors(movement + turn, before.error, after.error)
        noise = before.each + after.each
        if not movement or turn > MOST_TURN * movement or not (before.shared and after.shared) or change <= 2 * noise:
            return None
        return float(((change - noise) / (movement + turn)) ** 0.5)

    def constants(self, gap: float, regions: int | None = None) -> Constants | None:
        """Return the estimates as the theorems' constants, or None as long as one is missing.

        Args:
            gap: F(theta_1) - F_inf, or an upper bound such as the loss at the start if losses are never negative.
            regions: K, for sigma^2 of Assumption 5: the variance of the mean of one region, such that K sigma^2 is the
                measured sum over regions. None for Assumption 4.
        """
        values = {**self.values(regions), "gap": gap}
        return Constants(**values, estimated=True) if len(values) == 4 else None

    def values(self, regions: int | None = None) -> dict[str, float]:
        """Return those of L, sigma^2 and G that have been estimated so far, by their names in ``Constants``."""
        check_whole("regions", 1 if regions is None else regions, 1)
        variance = self.variance if regions is None or self.averaged is None else self.averaged / regions
        estimates = {"smoothness": self.smoothness, "variance": variance, "gradient": self.gradient}
        return {name: value for name, value in estimates.items() if value is not None}


def _added_by_errors(squared: float, *errors: float) -> float:
    """Return by how much errors enlarge a squared distance: (sqrt(squared) + sum of sqrt(error))^2 - squared."""
    roots = sum(map(math.sqrt, errors))
    return roots * (roots + 2 * math.sqrt(squared))


def _single(values: Params, like: Params) -> Params:
    """Return the values in the precision of these parameters, at least single."""
    return {name: value.to(torch.promote_types(like[name].dtype, torch.float32)) for name, value in values.items()}


def _running_mean(mean: float | None, value: float, count: int) -> float:
    """Return the mean of ``count`` values, given that of the earlier ones and the last value."""
    return value if mean is None else mean + (value - mean) / count
