"""L, sigma^2 and G guessed from what a round computes anyway: no gradient is evaluated for it.

All rests on the pseudo-gradient of a client inside its mask, g_n = (theta_q o m_n - theta_n) / reach. It is the mean
of the client's T stochastic gradients (with momentum a weighted mean, whose weights ``Steps`` knows).
Cost: a few operations for each entry of each update, and in a round seven numbers of eight bytes for each parameter,
whatever the cohort, of which 20 bytes are kept for the next round. None of the three is a bound: the assumptions speak
of all points, a run sees those that it visits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.errors import InputError, check_whole
from fedcover.params import Params, numbers
from fedcover.seeding import address
from fedcover.theory.bounds import Constants, Steps

MANY = (1 << 20) - 1
"""The low bits of an entry's holders, which count them; the others say who they are."""
MOST_TURN = 8.0
"""How many times theta's own way changes of masks may make between two rounds; L then comes out a third at worst."""


class Spread:
    """Running sums over a round's pseudo-gradients; memory does not grow with the cohort."""

    def __init__(self, theta: Params) -> None:
        self._theta = theta
        self._sum, self._squares = (
            {name: torch.zeros_like(t, dtype=torch.float64) for name, t in theta.items()} for _ in range(2)
        )
        self._holders = {name: torch.zeros_like(t, dtype=torch.int64) for name, t in theta.items()}
        self._places: list[int] = []
        self._norms: list[Tensor] = []
        self._steps: list[Steps] = []

    def add(self, update: ClientUpdate, steps: Steps, place: str = "") -> None:
        """Take in one client, which took these steps.

        Clients of two rounds that have the same place are compared with each other; by default the first with the
        first, and so on.
        """
        # Sums of such keys, which may overflow, differ for different sets of places, but for odds of one to 2^43.
        key = address(0, "place", place or str(len(self._places))) & ~MANY | 1
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
        self._places.append(key)
        self._norms.append(norm)
        self._steps.append(steps)

    def summary(self) -> "Summary":
        """What the round says of gradients and their noise."""
        if not self._norms:
            raise InputError("no update was added; add the updates of the round first")
        mean, parts = {}, []
        for name, total in self._sum.items():
            held = (self._holders[name] & MANY).double()
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
        reach = max(steps.reach for steps in self._steps)
        return Summary(
            mean, self._holders, {name: squares * reach**2 for name, squares in self._squares.items()},
            tuple(self._places), each * scale, averaged * scale, max(found[len(parts) :]),
            sum(steps.averaging for steps in self._steps) / len(self._steps), bool(shared_entries),
        )  # fmt: skip


@dataclass(frozen=True)
class Summary:
    """One round's pseudo-gradients in brief."""

    mean: Params
    """Their region average: what moved theta."""
    holders: dict[str, Tensor]
    """For each entry how many hold it, in the low bits, and a number that tells in which places, in the others."""
    drift: Params
    """For each entry the sum over its holders of how far it moved, squared."""
    places: tuple[int, ...]
    """The number of each client's place."""
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
    * ``smoothness``, L: the largest secant, how much the clients' gradients changed from one round to the next for
      the way that their models were apart; see ``_secant``. Whatever masks do, it is not above L but for noise. It
      sees curvature along the path alone, and none above 1 / reach: rather too small, but large enough to show that
      a step size breaks gamma <= 1/(6 L T). Rounds that are told apart by noise, or by their masks, are passed over.

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
        self.moved: Params = {}

    @classmethod
    def resumed(
        cls, passes: int, rounds: int, shared: int, guesses: Sequence[float | None], last: Summary, moved: Params
    ) -> "Estimate":
        """An estimate as it stood: rounds so far, those with shared entries, L, G, sigma^2 and its average."""
        estimate = cls(passes)
        estimate.rounds, estimate._shared = rounds, shared
        estimate.smoothness, estimate.gradient, estimate.variance, estimate.averaged = guesses
        estimate.last, estimate.moved = last, moved
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
            secant = self._secant(self.last, now, theta)
            self.smoothness = secant if self.smoothness is None else max(self.smoothness, secant or 0.0)
        # Single precision is enough for what comes from single values, and a checkpoint is smaller; it is rounded here,
        # so that a run that goes on has what a resumed one reads.
        self.last = replace(now, mean=_single(now.mean, theta), drift=_single(now.drift, theta))
        moved = {name: new_theta[name].double() - tensor.double() for name, tensor in theta.items()}
        self.moved = _single(moved, theta)
        self.rounds += 1

    def _secant(self, before: Summary, now: Summary, theta: Params) -> float | None:
        """How much gradients changed for each unit that models moved; None if noise or masks may have done it.

        Client n takes its gradients at theta o m_n, so between two rounds its point moves by more than theta if its
        mask changes: v_n = theta' o m'_n - theta o m_n. Where an entry has the same c holders in both rounds, the
        change d of its mean is the mean of theirs, whence

            sum_i c_i d_i^2 <= sum_n ||g'_n - g_n||^2 <= L^2 sum_n ||v_n||^2.

        Of an entry whose holders change, at least c + c' - N hold it in both rounds; the others count with its
        square and that of its drift, twice, since local steps move it after it came or before it went.
        """
        changes, ways, turns = [], [], []
        clients = len({*before.places, *now.places})
        for name, moved in self.moved.items():
            same = before.holders[name] == now.holders[name]
            old, new = ((one.holders[name] & MANY).double() for one in (before, now))
            both = torch.where(same, old, (old + new - clients).clamp_min(0.0))
            here = theta[name].double()
            came = (new - both) * here.square() + (new > both) * now.drift[name]
            went = (old - both) * (here - moved).square() + (old > both) * before.drift[name]
            changes.append(torch.where(same, old * (now.mean[name] - before.mean[name]).square(), 0.0).sum())
            ways.append((both * moved.square()).sum())
            turns.append(2 * (came + went).sum())
        found = numbers([*changes, *ways, *turns])
        change, way, turn = (sum(found[i : i + len(changes)]) for i in range(0, len(found), len(changes)))
        noise = before.each + now.each
        if not way or turn > MOST_TURN * way or not (before.shared and now.shared) or change <= 2 * noise:
            return None
        return float(((change - noise) / (way + turn)) ** 0.5)

    def constants(self, gap: float, regions: int | None = None) -> Constants | None:
        """The guesses as the theorems' constants, or None as long as one is missing.

        ``gap`` is F(theta_1) - F_inf; a loss at the start, if losses are never negative, is not below it. With
        ``regions``, K, sigma^2 is Assumption 5's: that of the average of one region, for which K sigma^2 is the
        measured sum over regions.
        """
        found = {**self.known(regions), "gap": gap}
        return Constants(**found, estimated=True) if len(found) == 4 else None

    def known(self, regions: int | None = None) -> dict[str, float]:
        """Those of L, sigma^2 and G that have been guessed so far, by the names of ``Constants``."""
        check_whole("regions", 1 if regions is None else regions, 1)
        noise = self.variance if regions is None or self.averaged is None else self.averaged / regions
        guesses = {"smoothness": self.smoothness, "variance": noise, "gradient": self.gradient}
        return {name: guess for name, guess in guesses.items() if guess is not None}


def _single(values: Params, like: Params) -> Params:
    """Numbers in the precision of these parameters, at least single."""
    return {name: value.to(torch.promote_types(like[name].dtype, torch.float32)) for name, value in values.items()}


def _toward(mean: float | None, value: float, count: int) -> float:
    """The mean of ``count`` values, of which this is the last."""
    return value if mean is None else mean + (value - mean) / count
