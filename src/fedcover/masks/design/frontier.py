"""The frontier: the least pruning noise for every coverage that budgets allow, and the best point on it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fedcover.errors import InputError
from fedcover.masks.design.profile import Profiles, Segment

Energy = Callable[[float], float]
"""The share of the squared norm that the first t items of a ranked list have."""


@dataclass(frozen=True)
class RankedList:
    """A ranked list of items: its size, the amount that each client may keep, and the energy of its first items."""

    size: float
    budgets: tuple[float, ...]
    energy: Energy


@dataclass(frozen=True)
class Point:
    """One point of the frontier."""

    gamma: int
    mean_noise: float
    """The mean over clients of delta^2."""
    noise_factor: float | None
    """(N / Gamma) x mean delta^2, to which the pruning term of the bound is proportional; None if Gamma is 0."""
    weights_gamma: int | None = None
    """The least coverage of any weight where ``gamma`` is the coverage of whole units; None for a design of weights."""
    bound: float | None = None
    """The value of the bound; None if it is infinite or its constants are unknown."""


@dataclass(frozen=True)
class Frontier:
    """The points for each Gamma, in ascending order."""

    points: tuple[Point, ...]

    def at(self, gamma: int) -> Point:
        """Return the point with this coverage, or raise InputError."""
        for point in self.points:
            if point.gamma == gamma:
                return point
        least, most = self.points[0].gamma, self.points[-1].gamma
        use = f"{least}, the only one on it" if least == most else f"{least} to {most}"
        raise InputError(f"coverage {gamma} is not on the frontier of these budgets; use {use}, or change a budget")

    def nearest(self, gamma: int) -> Point:
        """Return the point whose coverage is nearest to this one."""
        return self.at(min(max(gamma, self.points[0].gamma), self.points[-1].gamma))

    def within(self, noise: float) -> Point:
        """Return the point of most coverage whose mean noise is at most this, or raise InputError."""
        within = [point for point in self.points if point.mean_noise <= noise]
        if not within:
            least = min(point.mean_noise for point in self.points)
            raise InputError(
                f"noise must be at least {least:.4g}, the least mean noise that these budgets allow; got {noise:g};"
                " allow more, or raise a budget"
            )
        return within[-1]

    def best(self) -> Point:
        """Return the point with the least bound or, if its constants are unknown, with the least pruning term.

        The pruning term is what remains of the bound as the step size goes to 0. At a fixed step size gradient noise
        and drift remain, however many rounds are played, and both favour more coverage.
        """
        covered = [point for point in self.points if point.noise_factor is not None]
        if not covered:
            raise InputError(
                "these budgets leave part of the model without a holder; raise one until they sum to a whole model"
            )

        bounds = [point for point in covered if point.bound is not None]

        def value(point: Point) -> tuple[float, int]:
            objective = point.bound if bounds else point.noise_factor
            assert objective is not None
            return objective, -point.gamma  # of equal points the one with more coverage

        return min(bounds or covered, key=value)


def frontier(lists: Sequence[RankedList]) -> Frontier:
    """Return the frontier of one or several ranked lists under one Gamma, such as the layers of a model.

    Args:
        lists: One list for each layer. Energies are shares of the whole model's squared norm, so that noises add up.

    >>> [(p.gamma, round(p.mean_noise, 4)) for p in frontier([uniform_weights([1, 1, 0.5])]).points]
    [(2, 0.0417)]
    """
    if not lists:
        raise InputError("frontier needs at least one ranked list; give one for each layer that may be pruned")
    profiles = [Profiles(ranked.budgets, ranked.size) for ranked in lists]
    least = min(each.pieces[-1].count for each in profiles)
    most = min(each.most for each in profiles)
    clients = len(lists[0].budgets)
    # Cumulated noise of the nested pieces of each list, which the profiles of all coverages share.
    cumulated = [
        list(accumulate(_missing(each.pieces, clients, ranked.energy), initial=0.0))
        for each, ranked in zip(profiles, lists, strict=True)
    ]
    points = []
    for gamma in range(least, most + 1):
        noise = 0.0
        for each, sums, ranked in zip(profiles, cumulated, lists, strict=True):
            kept, tail = each.at(gamma)
            noise += sum(_missing(tail, clients, ranked.energy), sums[kept]) / clients
        points.append(Point(gamma, noise, clients / gamma * noise if gamma else None))
    return Frontier(tuple(points))


def noise_of(segments: Sequence[Segment], clients: int, energy: Energy) -> float:
    """Return the mean over clients of delta^2 for a profile: sum_i (N - c_i) theta_i^2 / N."""
    return sum(_missing(segments, clients, energy)) / clients


def _missing(segments: Sequence[Segment], clients: int, energy: Energy) -> Iterator[float]:
    """Yield for each segment its energy times the number of clients that do not hold it."""
    for segment in segments:
        yield (clients - segment.count) * (energy(segment.end) - energy(segment.start))


def uniform_weights(budgets: Sequence[float]) -> RankedList:
    """Return a list of weights whose magnitudes are uniform on [0, largest]; budgets are shares of the list."""
    return RankedList(1.0, tuple(float(budget) for budget in budgets), lambda share: 1 - (1 - share) ** 3)
