"""Theorems for frozen complements: without bounded gradients, and for convex losses.

The proofs are in docs/explanation/frozen-complements.md. Theorems 1 and 2 cover frozen complements too: pass them
``Scheme("frozen")``. Both need a bound G on gradients, which Theorems 3 and 4 do not. Theorem 3 is also valid for the
other complements, and for pruned models.
"""

import math
from dataclasses import dataclass

from fedcover.errors import InputError, check_number, check_whole
from fedcover.theory.bounds import Bound, Constants, Steps, check_cohort, drift_sum, ratio, sharp_factors
from fedcover.theory.scheme import Scheme

HOLDERS = ("balanced", "drawn", "fixed")
"""What is known about the holders of an entry when data are not IID."""
FROZEN = Scheme("frozen")
"""Frozen complements and region means."""


@dataclass(frozen=True)
class Heterogeneity:
    """How much the gradients of clients differ, and what is known about the holders of an entry.

    Args:
        squared: zeta^2: the mean over clients of ||grad F_n(theta_q) - grad F(theta_q)||^2 is at most this in every
            round; 0 if data are IID.
        holders: ``balanced``: the mean of the gradients of an entry's holders is that of F (Assumption 5).
            ``drawn``: the clients of a round are drawn uniformly at random, and get masks that do not depend on them.
            ``fixed``: all clients take part in every round, with any masks.
    """

    squared: float = 0.0
    holders: str = "balanced"

    def __post_init__(self) -> None:
        check_number("squared", self.squared, -1e-300, math.inf, "0 or more, and finite")
        if self.holders not in HOLDERS:
            raise InputError(f"holders must be one of {', '.join(HOLDERS)}; got {self.holders!r}")

    @property
    def doubling(self) -> int:
        """2 if the mean of an entry's holders has a bias, which adds to drift; otherwise 1."""
        return 2 if self.holders == "fixed" else 1

    def terms(self, slope: float, clients: int, gamma_min: int, damping: float) -> dict[str, float]:
        """Return the term of the holders' data by its name; no term if holders are balanced.

        It is 2 a zeta^2 (N/Gamma)^max(p, 1-p) / N with a = 3 L gamma T if clients are drawn, and
        6 (N/Gamma - 1) zeta^2 if they are fixed.
        """
        share = ratio(clients, gamma_min)
        if self.holders == "drawn":
            return {"sampling": 2 * slope * self.squared * share ** max(damping, 1 - damping) / clients}
        return {"heterogeneity": 6 * (share - 1) * self.squared} if self.holders == "fixed" else {}


IID = Heterogeneity()
"""All clients have the same F_n."""


def lemma2(
    constants: Constants, steps: Steps, clients: int, gradients: float, error: float = 0.0, spread: float = 0.0
) -> float:
    """Return the bound of Lemma 2 on the distance of local models from the global one, without bounded gradients.

        sum_t sum_n E||theta_{q,n,t-1} - theta_q||^2
            <= [4 gamma^2 S_T sum_n (||m_n o grad F||^2 + ||m_n o (grad F_n - grad F)||^2)
                + 2 gamma^2 T (T-1) N sigma^2 + T sum_n e_n] / (1 - u),    u = 2 (gamma L T)^2 < 1

    Args:
        constants: L and sigma^2.
        steps: The clients' local steps in a round.
        clients: N.
        gradients: sum_n ||m_n o grad F(theta_q)||^2.
        error: sum_n e_n.
        spread: sum_n ||m_n o (grad F_n - grad F)||^2 at theta_q, at most N zeta^2.

    >>> round(lemma2(Constants(0.1, 0.0, 0.0, 0.0), Steps(2, 0.5), clients=1, gradients=1.0), 4)
    1.0204
    """
    count, step = steps.count, steps.effective
    growth = 2 * (step * constants.smoothness * count) ** 2
    noise = 2 * count * (count - 1) * clients * constants.variance
    strayed = step**2 * (4 * drift_sum(count) * (gradients + spread) + noise) + count * error
    return strayed / (1 - growth) if growth < 1 else math.inf


def theorem3(
    constants: Constants,
    steps: Steps,
    rounds: int,
    clients: int,
    gamma_min: int,
    error: float = 0.0,
    scheme: Scheme = FROZEN,
    data: Heterogeneity = IID,
) -> Bound:
    """Return the bound of Theorem 3, which does not need bounded gradients: G is not used.

    Without momentum, for gamma L T <= 1/9 and gamma L T <= (Gamma/N)^((1-p)/2) / 4 (times 1/sqrt(2) with ``fixed``
    holders), it is

        start      4 gap / (gamma T Q (Gamma/N)^p)
        variance   6 L gamma sigma^2 N^(1-p) / Gamma^(2-p)
        drift      2 L^2 gamma^2 (N/Gamma) (T-1) [(2T-1) zeta^2 + 3 sigma^2]
        error      (3 L^2 / Gamma) error; absent if complements are frozen
        data       see ``Heterogeneity.terms``

    where drift and error are doubled with ``fixed`` holders. Momentum multiplies both by T/W. IID, without noise, and
    with frozen complements only start is left, so that gradients vanish at a constant step size.

    ``Bound.holds`` and ``Bound.largest_step`` replace the second condition by the weaker one that the proof needs:
    4 (gamma L)^2 (S_T / T) (N/Gamma)^(1-p) <= 1/9, or 1/18 with ``fixed`` holders.

    Args:
        constants: L, sigma^2 of a client's stochastic gradient, and the gap.
        steps: The clients' local steps in a round.
        rounds: Q.
        clients: N, the number of clients in a round.
        gamma_min: Gamma, the least coverage over rounds and entries.
        error: The mean over rounds of sum_n e_{q,n}; 0 if complements are frozen.
        scheme: What clients see outside their masks, and the damping of averages.
        data: How much clients' gradients differ.

    >>> constants = Constants(smoothness=0.5, variance=0.0, gradient=0.0, gap=3.0)
    >>> bound = theorem3(constants, Steps(4, 0.05), rounds=600, clients=4, gamma_min=1)
    >>> {name: round(value, 5) for name, value in bound.terms.items()}, bound.holds
    ({'start': 0.1, 'variance': 0.0, 'drift': 0.0}, True)
    """
    check_cohort(rounds, clients, gamma_min, error)
    smoothness, step, damping = constants.smoothness, steps.effective, scheme.damping
    growth = 2 * (step * smoothness * steps.count) ** 2
    share = (clients / max(1, gamma_min)) ** (1 - damping)
    feedback = 4 * data.doubling * (step * smoothness) ** 2 * drift_sum(steps.count) / steps.weight * share
    slope = 3 * smoothness * steps.reach
    strayed = 4 * drift_sum(steps.count) * data.squared + 2 * steps.count * (steps.count - 1) * constants.variance
    squared = 3 * data.doubling * smoothness**2 / steps.weight
    terms = {
        "start": ratio(4 * constants.gap, steps.reach * rounds * scheme.least_step(clients, gamma_min)),
        "variance": ratio(
            6 * smoothness * step * constants.variance * clients ** (1 - damping), gamma_min ** (2 - damping)
        ),
        "drift": ratio(squared * step**2 * clients * strayed, gamma_min),
        **scheme.error_terms(ratio(squared * steps.count, gamma_min), error),
        **data.terms(slope, clients, gamma_min, damping),
    }
    return Bound(
        theorem=3,
        terms=terms,
        steps=steps,
        slope=slope,
        step_ratio=max(9 * smoothness * step * steps.count, 3 * math.sqrt(feedback)),
        factors=sharp_factors(slope, feedback / (1 - growth), growth) if growth < 1 else (math.inf, math.inf),
        gamma_min=gamma_min,
        rounds=rounds,
    )


def theorem4(constants: Constants, steps: Steps, rounds: int, clients: int, gamma_min: int) -> Bound:
    """Return the bound of Theorem 4: convex F, IID data, frozen complements, damping 1, any number of local steps.

        2 N gap / (Gamma gamma Q) + N L gamma T sigma^2 / Gamma    for gamma <= 1/L

    By Jensen F(theta_{q+1}) <= (1/N) sum_n F(theta_q + Delta_n), and each client's steps descend. G is not used.

    Args:
        constants: L, sigma^2 and the gap.
        steps: The clients' local steps in a round, without momentum.
        rounds: Q.
        clients: N, the number of clients in a round.
        gamma_min: Gamma, the least coverage over rounds and entries.

    >>> constants = Constants(smoothness=0.5, variance=0.0, gradient=0.0, gap=3.0)
    >>> bound = theorem4(constants, Steps(10_000, 2.0), rounds=120, clients=4, gamma_min=1)
    >>> round(bound.total, 5), bound.holds
    (0.1, True)
    """
    check_cohort(rounds, clients, gamma_min, 0.0)
    if steps.momentum:
        raise InputError(f"momentum must be 0, since steps with momentum may ascend; got {steps.momentum}")
    curved = constants.smoothness * steps.size
    factor = 1 / (2 - curved) if curved < 2 else math.inf
    terms = {
        "start": ratio(2 * clients * constants.gap, gamma_min * steps.size * rounds),
        "variance": ratio(clients * curved * steps.count * constants.variance, gamma_min),
    }
    return Bound(4, terms, steps, 3 * curved * steps.count, curved, (factor, factor), gamma_min, rounds)


def staleness_error(steps: Steps, gradient: float, clients: int, gamma_min: int, window: int) -> float:
    """Return a bound on sum_n e_n of kept complements whose entries are refreshed at least every ``window`` rounds.

        N tau (tau + 1) (gamma T)^2 G (N/Gamma + 1)

    It falls with the square of the step size, as drift does, so that kept complements of rotating masks have no floor
    of their own. Copies may contain what the client received or what it trained.

    Args:
        steps: The clients' local steps in a round.
        gradient: G of Assumption 3.
        clients: N, the number of clients in a round.
        gamma_min: Gamma, the least coverage over rounds and entries.
        window: tau: what a client has outside its mask it trained at most so many rounds ago, or received then.

    >>> staleness_error(Steps(5, 0.1), gradient=1.0, clients=4, gamma_min=2, window=2)
    18.0
    """
    check_cohort(1, clients, gamma_min, 0.0)
    check_number("gradient", gradient, -1e-300, math.inf, "0 or more, and finite")
    check_whole("window", window, 1)
    return clients * window * (window + 1) * steps.reach**2 * gradient * (ratio(clients, gamma_min) + 1)
