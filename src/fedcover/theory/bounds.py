"""The paper's lemma and theorems, corrected, term by term.

Let reach = gamma T, the distance by which a constant gradient of length 1 moves a client in a round. One round of
Algorithm 1 moves theta by -reach (grad F + D + Z). Here D is the error of evaluating gradients at pruned and drifted
models instead of theta, and Z is gradient noise. Smoothness of F then gives, with a = 3 L reach,

    (1 - a) reach/2 E||grad F||^2 <= E F(theta_q) - E F(theta_{q+1}) + (1 + a) reach/2 E||D||^2 + 3/2 L reach^2 E||Z||^2

    E||D||^2 <= L^2 / (T Gamma) Lemma 1        E||Z||^2 <= N sigma^2 / (T Gamma^2), or K sigma^2 / T (Assumption 5)

Summing over Q rounds and dividing by (1 - a) Q reach/2 gives ``Bound.sharp``, for every a < 1. If a <= 1/2, that is
gamma <= 1/(6 L T), the factors 1/(1 - a) and (1 + a)/(1 - a) are at most 2 and 3, which gives the theorems.

Momentum that starts at 0 in each round is covered too. It makes a round a weighted one: client n moves by
-gamma/(1-mu) sum_t w_t g_t with w_t = 1 - mu^(T-t+1) <= 1. So gamma becomes gamma/(1-mu), T becomes W = sum_t w_t
wherever it counts steps, and S_T stays.

A ``Scheme`` changes what clients see outside their masks, which replaces e_n or removes it, and damps averages, which
divides start by (Gamma/N)^p and changes variance: docs/explanation/frozen-complements.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedcover.errors import InputError, check_number, check_whole
from fedcover.theory.scheme import Scheme

PRUNED = Scheme()
"""The scheme of Algorithm 1: pruned complements and region means."""


@dataclass(frozen=True)
class Constants:
    """The constants of the theorems' assumptions, which a server cannot know; ``Estimate`` estimates them."""

    smoothness: float
    """L of Assumption 1: gradients differ by at most L times the distance between the points."""
    variance: float
    """sigma^2: the variance of a stochastic gradient (Assumption 4) or of a region's mean gradient (Assumption 5)."""
    gradient: float
    """G of Assumption 3: the mean squared norm of a stochastic gradient is at most G."""
    gap: float
    """F(theta_1) - F_inf; at most F(theta_1) if the loss is never negative."""
    estimated: bool = False
    """Whether the constants were estimated from a run; a bound computed from them is then an estimate too."""

    def __post_init__(self) -> None:
        for name in ("smoothness", "variance", "gradient", "gap"):
            check_number(name, getattr(self, name), -1e-300, math.inf, "0 or more, and finite")


@dataclass(frozen=True)
class Steps:
    """A client's local training in a round: T steps of one size, with momentum that starts at 0.

    Args:
        count: T, the number of local steps.
        size: gamma, the step size.
        momentum: mu, in [0, 1).

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
        """Return steps of the theorems' size, gamma = 1/sqrt(TQ); with momentum gamma/(1-mu) = 1/sqrt(WQ).

        >>> Steps.of_theorem(4, rounds=25).size
        0.1
        """
        check_whole("rounds", rounds, 1)
        weight = cls(count, 1.0, momentum).weight
        return cls(count, (1 - momentum) / math.sqrt(weight * rounds), momentum)

    @property
    def effective(self) -> float:
        """The size of a step once momentum has built up, gamma/(1-mu)."""
        return self.size / (1 - self.momentum)

    @property
    def weight(self) -> float:
        """The number of effective steps, W = sum_t (1 - mu^t); T without momentum."""
        return self.count - self._faded(self.momentum)

    @property
    def reach(self) -> float:
        """The distance a constant gradient of length 1 moves a client: gamma/(1-mu) W; gamma T without momentum."""
        return self.effective * self.weight

    @property
    def averaging(self) -> float:
        """The factor by which averaging local gradients lowers their variance, sum_t w_t^2 / W^2; 1/T without momentum.

        >>> Steps(8, 0.1).averaging
        0.125
        """
        mu = self.momentum
        return (self.count - 2 * self._faded(mu) + self._faded(mu * mu)) / self.weight**2

    def _faded(self, ratio: float) -> float:
        """Return ratio + ratio^2 + ... + ratio^T."""
        return ratio * (1 - ratio**self.count) / (1 - ratio)


def drift_sum(steps: int) -> int:
    """Return S_T = 0^2 + 1^2 + ... + (T-1)^2 = T (T-1) (2T-1) / 6.

    >>> drift_sum(5), drift_sum(8)
    (30, 140)
    """
    return steps * (steps - 1) * (2 * steps - 1) // 6


def lemma1(step_size: float, clients: int, gradient: float, steps: int, errors: Sequence[float]) -> float:
    """Return the bound of Lemma 1 on the distance of local models from the global one in a round.

        sum_t sum_n E||theta_{q,n,t-1} - theta_q||^2  <=  gamma^2 N G S_T + T sum_n e_n.

    Drift is inside the mask and the pruning error e_n outside, so their squares add up. After t-1 steps drift is a sum
    of t-1 gradients, so its square is at most gamma^2 (t-1)^2 G.

    Args:
        step_size: gamma; with momentum gamma/(1-mu).
        clients: N.
        gradient: G.
        steps: T, the number of local steps.
        errors: e_n = ||theta_q - theta_q o m_n||^2 of each client.

    >>> lemma1(0.5, clients=2, gradient=1.0, steps=8, errors=[0.0, 0.5])
    74.0
    """
    return step_size**2 * clients * gradient * drift_sum(steps) + steps * math.fsum(errors)


def printed_lemma1(step_size: float, clients: int, gradient: float, steps: int, errors: Sequence[float]) -> float:
    """Return the right side of Lemma 1 as the paper prints it, gamma^2 T^2 N G + delta^2 N T ||theta||^2.

    The printed inequality is false in general for T >= 5. delta^2 ||theta||^2 is taken to be the largest error, the
    least value that Assumption 2 allows.
    """
    return step_size**2 * steps**2 * clients * gradient + clients * steps * max(errors, default=0.0)


@dataclass(frozen=True)
class Bound:
    """The right side of a theorem, term by term; a bound on (1/Q) sum_q E||grad F(theta_q)||^2 if ``holds``."""

    theorem: int
    terms: Mapping[str, float]
    """The terms that are present, by name.

    * ``start``: 4 (F(theta_1) - F_inf) / (gamma T Q (Gamma/N)^p), which falls with the number of rounds
    * ``variance``: the effect of gradient noise
    * ``drift``: the effect of local models moving away from theta
    * ``pruning``, or ``complement``: (3 L^2 / Gamma) (1/Q) sum_q sum_n e_{q,n}, the effect of what clients have
      outside their masks, which does not fall with the number of rounds; absent if complements are frozen
    * ``sampling`` and ``heterogeneity``: the effects of holders whose data differ from all clients' (Theorem 3)
    """
    steps: Steps
    slope: float
    """a = 3 L gamma T; ``sharp`` requires a < 1 in Theorems 1 to 3."""
    step_ratio: float
    """The step size divided by the largest that the theorem allows: 6 L gamma T in Theorems 1 and 2."""
    factors: tuple[float, float]
    """The factors of ``sharp``: that of start, variance and other noise, and that of the other terms."""
    gamma_min: int
    rounds: int

    @property
    def start(self) -> float:
        """The term ``start``."""
        return self.terms["start"]

    @property
    def variance(self) -> float:
        """The term ``variance``."""
        return self.terms["variance"]

    @property
    def drift(self) -> float:
        """The term ``drift``; 0 if it is absent."""
        return self.terms.get("drift", 0.0)

    @property
    def pruning(self) -> float:
        """The term ``pruning``; 0 if it is absent, since clients see the whole model."""
        return self.terms.get("pruning", 0.0)

    @property
    def total(self) -> float:
        """The bound, the sum of the terms."""
        return math.fsum(self.terms.values())

    @property
    def dominant(self) -> str:
        """The name of the largest term."""
        return max(self.terms, key=lambda name: self.terms[name])

    @property
    def covered(self) -> bool:
        """Whether every entry had a holder in every round: Gamma >= 1."""
        return self.gamma_min >= 1

    @property
    def step_holds(self) -> bool:
        """Whether the step size is small enough: gamma <= 1/(6 L T) in Theorems 1 and 2."""
        return self.step_ratio <= 1 + 1e-12

    @property
    def holds(self) -> bool:
        """Whether both conditions of the theorem hold."""
        return self.covered and self.step_holds

    @property
    def largest_step(self) -> float:
        """The largest step size that the theorem allows for these local steps."""
        return self.steps.size / self.step_ratio if self.step_ratio else math.inf

    @property
    def rounds_needed(self) -> int:
        """The least number of rounds for which the step size 1/sqrt(TQ) is small enough: Q >= 36 L^2 T."""
        needed = (self.step_ratio / self.steps.effective) ** 2 / self.steps.weight
        return max(1, math.ceil(needed * (1 - 1e-12)))

    def sharp(self) -> "Bound":
        """Return the bound for the actual a instead of the largest: smaller for smaller steps, infinite if too large.

        In Theorems 1 and 2 start and variance are multiplied by 1 / (2 (1 - a)), drift and pruning by
        (1 + a) / (3 (1 - a)).

        >>> bound = theorem1(Constants(1.0, 1.0, 1.0, 1.0), Steps(1, 0.1), 100, clients=4, gamma_min=2, error=0.0)
        >>> bound.sharp().total < bound.total
        True
        """
        first, second = self.factors
        noise = {"start", "variance", "sampling"}
        sharper = {name: _product(first if name in noise else second, value) for name, value in self.terms.items()}
        return replace(self, terms=sharper)


def sharp_factors(slope: float, feedback: float = 0.0, growth: float = 0.0) -> tuple[float, float]:
    """Return the factors of ``Bound.sharp``: 1 / (2 s) and (1 + a) / (3 s (1 - u)) with s = 1 - a - (1 + a) kappa.

    Args:
        slope: a = 3 L gamma T.
        feedback: kappa, the share of ||grad F||^2 that comes back as drift; 0 if gradients are bounded.
        growth: u, by which drift enlarges itself; 0 if gradients are bounded.
    """
    rest = 1 - slope - (1 + slope) * feedback
    if rest <= 0 or growth >= 1:
        return math.inf, math.inf
    return 1 / (2 * rest), (1 + slope) / (3 * rest * (1 - growth))


def theorem1(
    constants: Constants,
    steps: Steps,
    rounds: int,
    clients: int,
    gamma_min: int,
    error: float,
    scheme: Scheme = PRUNED,
) -> Bound:
    """Return the bound of Theorem 1, corrected (Assumptions 1 to 4, IID data).

    With gamma = 1/sqrt(TQ) and the scheme of Algorithm 1 it is

        [4 gap + 6 L N sigma^2 / Gamma^2] / sqrt(TQ) + L^2 N G (T-1)(2T-1) / (2 T Gamma Q) + (3 L^2 / Gamma) error.

    Damping p multiplies the gap by (N/Gamma)^p and the noise by (Gamma/N)^p.

    Args:
        constants: L, sigma^2, G and the gap.
        steps: The clients' local steps in a round.
        rounds: Q.
        clients: N, the number of clients in a round.
        gamma_min: Gamma, the least coverage over rounds and regions.
        error: The mean over rounds of sum_n e_{q,n}; 0 if complements are frozen.
        scheme: What clients see outside their masks, and the damping of averages.

    >>> constants, steps = Constants(0.5, 1.0, 2.0, 3.0), Steps.of_theorem(4, rounds=100)
    >>> bound = theorem1(constants, steps, rounds=100, clients=2, gamma_min=1, error=0.1)
    >>> {name: round(value, 5) for name, value in bound.terms.items()}
    {'start': 0.6, 'variance': 0.3, 'drift': 0.02625, 'pruning': 0.075}
    >>> bound.dominant, bound.holds, bound.rounds_needed
    ('start', True, 36)
    >>> frozen = theorem1(constants, steps, 100, 2, 1, error=0.0, scheme=Scheme("frozen", damping=1.0))
    >>> {name: round(value, 5) for name, value in frozen.terms.items()}
    {'start': 1.2, 'variance': 0.15, 'drift': 0.02625}
    """
    check_cohort(rounds, clients, gamma_min, error)
    damping = scheme.damping
    noise = ratio(clients ** (1 - damping) * constants.variance, gamma_min ** (2 - damping))
    return _bound(1, constants, steps, rounds, clients, gamma_min, error, noise, scheme)


def theorem2(
    constants: Constants,
    steps: Steps,
    rounds: int,
    clients: int,
    gamma_min: int,
    error: float,
    regions: int,
    scheme: Scheme = PRUNED,
) -> Bound:
    """Return the bound of Theorem 2, corrected (Assumptions 1 to 3 and 5, non-IID data).

    It is Theorem 1 with K sigma^2 in place of N sigma^2 / Gamma^2; Gamma stays in drift and pruning. sigma^2 is the
    variance of a region's average gradient. Damping p multiplies gap and noise by (N/Gamma)^p: Assumption 5 bounds the
    noise of a region that all clients hold no better than that of others.

    Args:
        regions: K, the largest number of regions in any round. The other arguments are those of ``theorem1``.
    """
    check_cohort(rounds, clients, gamma_min, error)
    check_whole("regions", regions, 1)
    noise = ratio(regions * constants.variance, scheme.least_step(clients, gamma_min))
    return _bound(2, constants, steps, rounds, clients, gamma_min, error, noise, scheme)


def _bound(
    theorem: int,
    constants: Constants,
    steps: Steps,
    rounds: int,
    clients: int,
    gamma_min: int,
    error: float,
    noise: float,
    scheme: Scheme,
) -> Bound:
    """Return the bound of either theorem; ``noise`` is N^(1-p) sigma^2 / Gamma^(2-p) or K sigma^2 (N/Gamma)^p."""
    squared, step = constants.smoothness**2, steps.effective
    slope = 3 * constants.smoothness * steps.reach
    drift = 3 * squared * step**2 * clients * constants.gradient * drift_sum(steps.count)
    terms = {
        "start": ratio(4 * constants.gap, steps.reach * rounds * scheme.least_step(clients, gamma_min)),
        "variance": _product(6 * constants.smoothness * step, noise),
        "drift": ratio(drift, steps.weight * gamma_min),
        **scheme.error_terms(ratio(3 * squared, gamma_min), error),
    }
    return Bound(theorem, terms, steps, slope, 2 * slope, sharp_factors(slope), gamma_min, rounds)


def check_cohort(rounds: int, clients: int, gamma_min: int, error: float) -> None:
    """Raise InputError unless these are a number of rounds, of clients, the least coverage by them, and an error."""
    check_whole("rounds", rounds, 1)
    check_whole("clients", clients, 1)
    check_whole("gamma_min", gamma_min, 0)
    if gamma_min > clients:
        raise InputError(f"gamma_min must be at most the number of clients, {clients}; got {gamma_min}")
    check_number("error", error, -1e-300, math.inf, "0 or more, and finite")


def ratio(top: float, bottom: float) -> float:
    """Return top / bottom; infinity if bottom is 0, that is, if an entry has no holder."""
    return top / bottom if bottom else math.inf


def _product(factor: float, value: float) -> float:
    """Return factor * value, where 0 times infinity is 0."""
    return factor * value if factor and value else 0.0
