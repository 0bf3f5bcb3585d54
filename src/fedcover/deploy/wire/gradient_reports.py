"""Comparison of gradient reports between clients, so that one client cannot decide the mask of all."""

import math
from collections.abc import Mapping
from statistics import median

from torch import Tensor

from fedcover.params import numbers

MIN_OTHERS = 2
"""The number of other reports needed: if two reports differ, either may be the wrong one."""
GRADIENT_FACTOR = 100
"""Gradient norms of honest clients differ far more than their updates (up to 100x late in training), so allow this
multiple of the limit."""


def oversized_reports(reports: Mapping[int, Mapping[str, Tensor]], limit: float) -> dict[int, str]:
    """Return the reason for each client whose gradient report is too large.

    A gradient report sums squared gradient entries over a client's steps. The square root of the sum of all its entries
    is a norm, which must be at most ``GRADIENT_FACTOR * limit`` times the median norm of the other clients.

    Args:
        reports: Gradient reports by client.
        limit: The norm limit for updates; infinity disables the check.

    >>> import torch
    >>> reports = {client: {"w": torch.full((2,), size)} for client, size in enumerate((1.0, 2.0, 1e9))}
    >>> oversized_reports(reports, 10.0)
    {2: "its reported gradient is 2.62e+04 times the others', over the limit of 1000"}
    """
    if limit == math.inf or len(reports) <= MIN_OTHERS:
        return {}
    sums = numbers([tensor.double().sum() for report in reports.values() for tensor in report.values()])
    tensors = len(sums) // len(reports)
    norms = {client: math.sqrt(sum(sums[i * tensors : (i + 1) * tensors])) for i, client in enumerate(reports)}
    reasons, bound = {}, GRADIENT_FACTOR * limit
    for client, norm in norms.items():
        usual = median(value for key, value in norms.items() if key != client)
        if usual and norm > bound * usual:  # a ratio to a zero gradient is undefined
            reasons[client] = (
                f"its reported gradient is {norm / usual:.3g} times the others', over the limit of {bound:g}"
            )
    return reasons
