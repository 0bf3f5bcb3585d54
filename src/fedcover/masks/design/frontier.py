"""The frontier: for every coverage that budgets allow, the least pruning noise; and the point to choose on it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fedcover.errors import InputError
from fedcover.masks.design.profile import Profiles, Segment

Energy = Callable[[float], float]
"""The share of the squared norm that the first t items of a ranked list hold."""


@dataclass(frozen=True)
class RankedList:
    """A ranked list of items: its size, what each client may keep of it, and the energy of its first items."""

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
    """(N / Gamma) x mean delta^2, to which the pruning term of the bound is proportional; None without coverage."""
    weights_gamma: int | None = None
    """With whole units, whose coverage ``gamma`` is: the least coverage of any weight; None for a design of weights."""
    bound: float | None = None
    """What the bound comes to here, if its constants are known; None too where it is infinite."""


@dataclass(frozen=True)
class Frontier:
    """The points for each Gamma, the least first."""

    points: tuple[Point, ...]

    def at(self, gamma: int) -> Point:
        """The point with this coverage."""
        found = [point for point in self.points if point.gamma == gamma]
        if not found:
            least, most = self.points[0].gamma, self.points[-1].gamma
            use = f"{least}, the only one there is" if least == most else f"{least} to {most}"
            raise InputError(f"coverage {gamma} is not on the frontier of these budgets; use {use}, or change a budget")
        return found[0]

    def nearest(self, gamma: int) -> Point:
        """The point with this coverage, or that whose coverage comes nearest."""
        return self.at(min(max(gamma, self.points[0].gamma), self.points[-1].gamma))

    def within(self, noise: float) -> Point:
        """The point of most coverage whose mean noise is at most this."""
        found = [point for point in self.points if point.mean_noise <= noise]
        if not found:
            least = min(point.mean_noise for point in self.points)
            raise InputError(
                f"no masks have a mean noise of {noise:g}; these budgets reach {least:.4g} at least: ask for that or"
                " more, or raise a budget"
            )
        return found[-1]

    def best(self) -> Point:
        """The point where the bound is least, if its constants are known, or else the pruning term of it.

        The pruning term alone is what remains of the bound as the step size goes to 0. At a fixed step size gradient
        noise and drift stay however many rounds are played, and both favour more coverage.
        """
        covered = [point for point in self.points if point.noise_factor is not None]
        if not covered:
            raise InputError(
                "these budgets leave part of the model to nobody; raise one until they sum to a whole model"
            )

        bounds = [point for point in covered if point.bound is not None]

        def value(point: Point) -> tuple[float, int]:
            found = point.bound if bounds else point.noise_factor
            assert found is not None
            return found, -point.gamma  # of equals the one with more coverage

        return min(bounds or covered, key=value)


def frontier(lists: Sequence[RankedList]) -> Frontier:
    """The frontier of one or several ranked lists under one Gamma, such as the layers of a model.

    Energies are shares of the whole model's squared norm, so that noises add up over the lists.

    >>> [(p.gamma, round(p.mean_noise, 4)) for p in frontier([uniform_weights([1, 1, 0.5])]).points]
    [(2, 0.0417)]
    """
    if not lists:
        raise InputError("there are no lists to design masks for; give one for each layer that may be pruned")
    found = [Profiles(one.budgets, one.size) for one in lists]
    least = min(one.pieces[-1].count for one in found)
    most = min(one.most for one in found)
    clients = len(lists[0].budgets)
    # The noise of the first so many nested pieces of each list, which profiles of any coverage have in common.
    begun = [
        list(accumulate(_missing(profiles.pieces, clients, one.energy), initial=0.0))
        for profiles, one in zip(found, lists, strict=True)
    ]
    points = []
    for gamma in range(least, most + 1):
        noise = 0.0
        for profiles, sums, one in zip(found, begun, lists, strict=True):
            kept, tail = profiles.at(gamma)
            noise += sum(_missing(tail, clients, one.energy), sums[kept]) / clients
        points.append(Point(gamma, noise, clients / gamma * noise if gamma else None))
    return Frontier(tuple(points))


def noise_of(segments: Sequence[Segment], clients: int, energy: Energy) -> float:
    """The mean over clients of delta^2 for a profile: sum_i (N - c_i) theta_i^2 / N."""
    return sum(_missing(segments, clients, energy)) / clients


def _missing(segments: Sequence[Segment], clients: int, energy: Energy) -> Iterator[float]:
    """For each segment what its energy is to all clients that do not hold it."""
    for segment in segments:
        yield (clients - segment.count) * (energy(segment.end) - energy(segment.start))


def uniform_weights(budgets: Sequence[float]) -> RankedList:
    """A list of weights whose magnitudes are spread evenly between 0 and the largest; budgets are shares of it."""
    return RankedList(1.0, tuple(float(budget) for budget in budgets), lambda share: 1 - (1 - share) ** 3)
