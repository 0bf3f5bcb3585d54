"""Reports of squared gradients, held against each other: one client's must not decide the mask of all."""

import math
from collections.abc import Mapping
from statistics import median

from fedcover.params import Params, numbers

LEAST_OTHERS = 2
"""How many other reports there must be: of two that differ nobody knows which is wrong."""
TIMES = 100
"""So much more than updates may the gradients of honest clients differ: late in training most are nearly 0, and those
of a client with hard examples are a hundred times as large."""


def too_large(reports: Mapping[int, Params], limit: float) -> dict[int, str]:
    """Why reports are left out, by client: those whose gradient is over ``limit`` a hundred times, in terms of the
    median of the others'.

    A report sums squares of gradients' entries over a client's steps, as it counts in the mean of reports; the root of
    all of them is held against the limit, as the norm of an update is.

    >>> import torch
    >>> reports = {client: {"w": torch.full((2,), size)} for client, size in enumerate((1.0, 2.0, 1e9))}
    >>> too_large(reports, 10.0)
    {2: "its reported gradient is 2.62e+04 times the others', over the limit of 1000"}
    """
    if limit == math.inf or len(reports) <= LEAST_OTHERS:
        return {}
    sums = numbers([tensor.double().sum() for report in reports.values() for tensor in report.values()])
    each = len(sums) // len(reports)
    norms = {who: math.sqrt(sum(sums[i * each : (i + 1) * each])) for i, who in enumerate(reports)}
    found, most = {}, TIMES * limit
    for who, norm in norms.items():
        usual = median(other for one, other in norms.items() if one != who)
        if usual and norm > most * usual:  # of gradients that are nothing there is no multiple
            found[who] = f"its reported gradient is {norm / usual:.3g} times the others', over the limit of {most:g}"
    return found
