"""Paired comparisons over seeds: mean difference, 95 % confidence interval, p-value of Student's t-test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from fedcover.errors import InputError


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, where it may lie, and how surprising it is if there is none."""

    mean: float
    low: float
    high: float
    """Ends of the 95 % confidence interval."""
    p: float
    pairs: int


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """How much larger the first is than the second, seed by seed.

    >>> found = paired([2.0, 3.1, 4.2], [1.0, 2.0, 3.0])
    >>> round(found.mean, 2), round(found.low, 2), round(found.high, 2), round(found.p, 4)
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
    reach = quantile(0.95, freedom) * error
    return Difference(mean, mean - reach, mean + reach, 1 - within(mean / error, freedom), len(gaps))


def within(t: float, freedom: int) -> float:
    """How likely Student's t lies between -t and t; exact for whole degrees of freedom.

    >>> round(within(2.776445, 4), 6), round(within(12.7062, 1), 6)
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


def quantile(share: float, freedom: int) -> float:
    """The t between whose ends this share lies.

    >>> round(quantile(0.95, 4), 4), round(quantile(0.95, 9), 4)
    (2.7764, 2.2622)
    """
    low, high = 0.0, 1.0
    while within(high, freedom) < share:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < share else (low, middle)
    return high


def holm(ps: Sequence[float]) -> list[float]:
    """The p-values of several comparisons, raised so that all hold together (Holm's correction).

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    raised, least = [0.0] * len(ps), 0.0
    for place, i in enumerate(order):
        least = max(least, min(1.0, (len(ps) - place) * ps[i]))
        raised[i] = least
    return raised
