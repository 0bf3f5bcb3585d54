"""Paired comparisons over seeds: mean difference, 95 % confidence interval, p-value of Student's t-test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedcover.errors import InputError


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences with its confidence interval and p-value."""

    mean: float
    low: float
    high: float
    """Ends of the 95 % confidence interval."""
    p: float
    """Two-sided p-value of the hypothesis that the true mean difference is 0."""
    pairs: int


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Return the difference first - second, paired by seed, with Student's t-test.

    Args:
        first: One value per seed.
        second: The values of the same seeds, in the same order.

    Raises:
        InputError: The lists differ in length or have fewer than 2 values.

    >>> gain = paired([2.0, 3.1, 4.2], [1.0, 2.0, 3.0])
    >>> round(gain.mean, 2), round(gain.low, 2), round(gain.high, 2), round(gain.p, 4)
    (1.1, 0.85, 1.35, 0.0027)
    """
    if len(first) != len(second) or len(first) < 2:
        raise InputError(
            f"a paired comparison needs two lists of equal length, 2 or more; got {len(first)} and {len(second)}"
        )
    gaps = [a - b for a, b in zip(first, second, strict=True)]
    mean, freedom = fmean(gaps), len(gaps) - 1
    error = stdev(gaps) / math.sqrt(len(gaps))
    if error == 0:
        return Difference(mean, mean, mean, 1.0 if mean == 0 else 0.0, len(gaps))
    reach = student_t_quantile(0.95, freedom) * error
    p = 1 - student_t_probability(mean / error, freedom)
    return Difference(mean, mean - reach, mean + reach, p, len(gaps))


def student_t_probability(t: float, freedom: int) -> float:
    """Return P(-|t| < T < |t|) for Student's t with ``freedom`` degrees of freedom, by the exact finite sum.

    >>> round(student_t_probability(2.776445, 4), 6), round(student_t_probability(12.7062, 1), 6)
    (0.95, 0.95)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def student_t_quantile(share: float, freedom: int) -> float:
    """Return the t for which Student's t lies in (-t, t) with probability ``share``.

    >>> round(student_t_quantile(0.95, 4), 4), round(student_t_quantile(0.95, 9), 4)
    (2.7764, 2.2622)
    """
    low, high = 0.0, 1.0
    while student_t_probability(high, freedom) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_probability(middle, freedom) < share else (low, middle)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's method, which bounds the chance of any false positive among them.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    corrected, least = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = least
    return corrected
