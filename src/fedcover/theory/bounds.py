"""The paper's lemma and theorems, corrected, as numbers: each term by itself.

Write reach = gamma T, how far a constant gradient of length 1 moves a client in a round. One round of
Algorithm 1 moves theta by -reach (grad F + D + Z), where D is the error of gradients taken at pruned and
drifted models instead of theta, and Z is gradient noise. Smoothness of F then gives, with a = 3 L reach,

    (1 - a) reach/2 E||grad F||^2 <= E F(theta_q) - E F(theta_{q+1}) + (1 + a) reach/2 E||D||^2 + 3/2 L reach^2 E||Z||^2

    E||D||^2 <= L^2 / (T Gamma) Lemma 1        E||Z||^2 <= N sigma^2 / (T Gamma^2), or K sigma^2 / T (Assumption 5)

Summed over Q rounds and divided by (1 - a) Q reach/2 that is ``Bound.sharp``, for every a < 1. With a <= 1/2,
which is gamma <= 1/(6 L T), the factors 1/(1 - a) and (1 + a)/(1 - a) are at most 2 and 3: the theorems.

Momentum that starts at 0 in each round fits in. Its round is a weighted one: client n moves by
-gamma/(1-mu) sum_t w_t g_t with w_t = 1 - mu^(T-t+1) <= 1. So gamma becomes gamma/(1-mu), T becomes W = sum_t w_t
wherever it counts steps, and S_T stays.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedcover.errors import InputError, check_number, check_whole

TERMS = ("start", "variance", "drift", "pruning")


@dataclass(frozen=True)
class Constants:
    """What the theorems take for granted and no server knows; see ``Estimate`` for what it can guess."""

    smoothness: float
    """L of Assumption 1: gradients differ by at most L times the distance."""
    variance: float
    """sigma^2: of one stochastic gradient (Assumption 4), or of a region's average gradient (Assumption 5)."""
    gradient: float
    """G of Assumption 3: the mean squared norm of a stochastic gradient is at most G."""
    gap: float
    """F(theta_1) - F_inf; a loss that is never negative starts at most F(theta_1) above its infimum."""
    estimated: bool = False
    """Whether they were guessed from a run: then a bound made of them is a guess too."""

    def __post_init__(self) -> None:
        for name in ("smoothness", "variance", "gradient", "gap"):
            check_number(name, getattr(self, name), -1e-300, math.inf, "0 or more, and finite")


@dataclass(frozen=True)
class Steps:
    """A client's local training in a round: T steps of one size, with momentum that starts at 0.

    >>> Steps(8, 0.1).reach, round(Steps(8, 0.1, momentum=0.5).reach, 4)
    (0.8, 1.4008)
    """

    count: int
    size: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_whole("count", self.count, 1)
        check_number("size", self.size, 0, math.inf, "a positive number")
        check_number("momentum", self.momentum, -1e-300, 1, "a number in [0, 1)")

    @classmethod
    def of_theorem(cls, count: int, rounds: int, momentum: float = 0.0) -> "Steps":
        """The theorems' step size gamma = 1/sqrt(TQ); with momentum gamma/(1-mu) = 1/sqrt(WQ).

        >>> Steps.of_theorem(4, rounds=25).size
        0.1
        """
        check_whole("rounds", rounds, 1)
        weight = cls(count, 1.0, momentum).weight
        return cls(count, (1 - momentum) / math.sqrt(weight * rounds), momentum)

    @property
    def effective(self) -> float:
        """gamma/(1-mu), the size of a step once momentum has built up."""
        return self.size / (1 - self.momentum)

    @property
    def weight(self) -> float:
        """W = sum_t (1 - mu^t): the number of effective steps; T without momentum."""
        return self.count - self._faded(self.momentum)

    @property
    def reach(self) -> float:
        """How far a constant gradient of length 1 moves a client: gamma/(1-mu) W, and gamma T without momentum."""
        return self.effective * self.weight

    @property
    def averaging(self) -> float:
        """sum_t w_t^2 / W^2: what is left of the variance of independent gradients in their mean; 1/T without momentum.

        >>> Steps(8, 0.1).averaging
        0.125
        """
        mu = self.momentum
        return (self.count - 2 * self._faded(mu) + self._faded(mu * mu)) / self.weight**2

    def _faded(self, ratio: float) -> float:
        """ratio + ratio^2 + ... + ratio^T."""
        return ratio * (1 - ratio**self.count) / (1 - ratio)


def drift_sum(steps: int) -> int:
    """S_T = 0^2 + 1^2 + ... + (T-1)^2 = T (T-1) (2T-1) / 6.

    >>> drift_sum(5), drift_sum(8)
    (30, 140)
    """
    return steps * (steps - 1) * (2 * steps - 1) // 6


def lemma1(step_size: float, clients: int, gradient: float, steps: int, errors: Sequence[float]) -> float:
    """At most how far local models stray in a round: sum_t sum_n E||theta_{q,n,t-1} - theta_q||^2.

    gamma^2 N G S_T + T sum_n e_n. Drift lies inside the mask and the pruning error e_n outside, so their squares
    add up. After t-1 steps drift is a sum of t-1 gradients: its square is at most gamma^2 (t-1)^2 G. With momentum
    give gamma/(1-mu) as the step size.

    >>> lemma1(0.5, clients=2, gradient=1.0, steps=8, errors=[0.0, 0.5])
    74.0
    """
    return step_size**2 * clients * gradient * drift_sum(steps) + steps * math.fsum(errors)


def printed_lemma1(step_size: float, clients: int, gradient: float, steps: int, errors: Sequence[float]) -> float:
    """The right side as the paper prints it, gamma^2 T^2 N G + delta^2 N T ||theta||^2: false in general from T = 5 on.

    delta^2 ||theta||^2 is the largest error, the least that Assumption 2 allows.
    """
    return step_size**2 * steps**2 * clients * gradient + clients * steps * max(errors, default=0.0)


@dataclass(frozen=True)
class Bound:
    """The right side of a theorem, term by term; it bounds (1/Q) sum_q E||grad F(theta_q)||^2 if ``holds``."""

    theorem: int
    start: float
    """4 (F(theta_1) - F_inf) / (gamma T Q): falls with rounds."""
    variance: float
    """6 L gamma N sigma^2 / Gamma^2, or 6 L gamma K sigma^2 in Theorem 2: gradient noise."""
    drift: float
    """3 L^2 gamma^2 N G S_T / (T Gamma): clients walk away from theta."""
    pruning: float
    """(3 L^2 / Gamma) (1/Q) sum_q sum_n e_{q,n}: more rounds do not make it smaller."""
    steps: Steps
    slope: float
    """a = 3 L gamma T; the theorems ask for a <= 1/2, ``sharp`` for a < 1."""
    gamma_min: int
    rounds: int
    rounds_needed: int
    """From how many rounds on the theorems' own step size 1/sqrt(TQ) is small enough: Q >= 36 L^2 T."""

    @property
    def terms(self) -> dict[str, float]:
        """The four terms by name."""
        return {name: float(getattr(self, name)) for name in TERMS}

    @property
    def total(self) -> float:
        """The bound."""
        return math.fsum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(TERMS, key=lambda name: self.terms[name])

    @property
    def covered(self) -> bool:
        """Whether every entry was held in every round."""
        return self.gamma_min >= 1

    @property
    def step_holds(self) -> bool:
        """Whether the step size is small enough: gamma <= 1/(6 L T)."""
        return self.slope <= 0.5 * (1 + 1e-12)

    @property
    def holds(self) -> bool:
        """Whether both conditions of the theorem hold."""
        return self.covered and self.step_holds

    @property
    def largest_step(self) -> float:
        """The largest step size that the theorem allows for these local steps."""
        return self.steps.size / (2 * self.slope) if self.slope else math.inf

    def sharp(self) -> "Bound":
        """The bound before a is replaced by 1/2: smaller for smaller steps, infinite from a = 1 on.

        >>> found = theorem1(Constants(1.0, 1.0, 1.0, 1.0), Steps(1, 0.1), 100, clients=4, gamma_min=2, error=0.0)
        >>> found.sharp().total < found.total
        True
        """
        room = 1 - self.slope
        once, both = (1 / (2 * room), (1 + self.slope) / (3 * room)) if room > 0 else (math.inf, math.inf)
        return replace(
            self,
            start=_product(once, self.start),
            variance=_product(once, self.variance),
            drift=_product(both, self.drift),
            pruning=_product(both, self.pruning),
        )


def theorem1(constants: Constants, steps: Steps, rounds: int, clients: int, gamma_min: int, error: float) -> Bound:
    """Theorem 1, corrected (Assumptions 1 to 4, IID data).

    ``clients`` is N of a round, ``gamma_min`` the least coverage over rounds and regions, and ``error`` the mean over
    rounds of sum_n e_{q,n}. With gamma = 1/sqrt(TQ) it reads

        [4 gap + 6 L N sigma^2 / Gamma^2] / sqrt(TQ) + L^2 N G (T-1)(2T-1) / (2 T Gamma Q) + (3 L^2 / Gamma) error

    >>> known, steps = Constants(0.5, 1.0, 2.0, 3.0), Steps.of_theorem(4, rounds=100)
    >>> found = theorem1(known, steps, rounds=100, clients=2, gamma_min=1, error=0.1)
    >>> {name: round(value, 5) for name, value in found.terms.items()}
    {'start': 0.6, 'variance': 0.3, 'drift': 0.02625, 'pruning': 0.075}
    >>> found.dominant, found.holds, found.rounds_needed
    ('start', True, 36)
    """
    noise = _ratio(clients * constants.variance, gamma_min**2)
    return _bound(1, constants, steps, rounds, clients, gamma_min, error, noise)


def theorem2(
    constants: Constants, steps: Steps, rounds: int, clients: int, gamma_min: int, error: float, regions: int
) -> Bound:
    """Theorem 2, corrected (Assumptions 1 to 3 and 5, non-IID data).

    Theorem 1 with K sigma^2 in place of N sigma^2 / Gamma^2; Gamma stays in drift and pruning. ``regions`` is K, the
    most regions of any round, and sigma^2 that of a region's average gradient.
    """
    check_whole("regions", regions, 1)
    return _bound(2, constants, steps, rounds, clients, gamma_min, error, regions * constants.variance)


def _bound(
    theorem: int, known: Constants, steps: Steps, rounds: int, clients: int, gamma_min: int, error: float, noise: float
) -> Bound:
    check_whole("rounds", rounds, 1)
    check_whole("clients", clients, 1)
    check_whole("gamma_min", gamma_min, 0)
    if gamma_min > clients:
        raise InputError(f"gamma_min must be at most the number of clients, {clients}; got {gamma_min}")
    check_number("error", error, -1e-300, math.inf, "0 or more, and finite")
    squared, step = known.smoothness**2, steps.effective
    return Bound(
        theorem=theorem,
        start=4 * known.gap / (steps.reach * rounds),
        variance=_product(6 * known.smoothness * step, noise),
        drift=_ratio(
            3 * squared * step**2 * clients * known.gradient * drift_sum(steps.count), steps.weight * gamma_min
        ),
        pruning=_ratio(3 * squared * error, gamma_min),
        steps=steps,
        slope=3 * known.smoothness * steps.reach,
        gamma_min=gamma_min,
        rounds=rounds,
        rounds_needed=max(1, math.ceil(36 * squared * steps.weight * (1 - 1e-12))),
    )


def _ratio(top: float, bottom: float) -> float:
    """top / bottom, infinite where nobody holds an entry."""
    return top / bottom if bottom else math.inf


def _product(factor: float, value: float) -> float:
    """factor * value, where nothing times infinity is nothing."""
    return factor * value if factor and value else 0.0
