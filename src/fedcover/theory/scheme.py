"""Schemes: what clients see outside their masks, and how averages are damped; and the complement's error."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.errors import InputError, check_number, check_whole
from fedcover.params import Mask, Params, numbers

ERROR_TERMS = {"pruned": "pruning", "frozen": None, "quantized": "complement", "kept": "complement"}
"""The complements, and the name of the term that each one's error causes; None if there is no error."""


@dataclass(frozen=True)
class Scheme:
    """How a round differs from Algorithm 1: what clients see outside their masks, and how averages are damped.

    Client n evaluates gradients at m_n o y + (1 - m_n) o z_n. Its complement z_n is 0 (``pruned``, Algorithm 1), theta
    (``frozen``), theta in few bits (``quantized``), or the client's copy from earlier rounds (``kept``). The error of
    the complement is e_n = ||(1 - m_n) o (theta - z_n)||^2.

    Args:
        complement: One of the keys of ``ERROR_TERMS``.
        damping: p in [0, 1]: entry i, which c_i of N clients hold, moves (c_i/N)^p of the way to the mean of its
            holders. 0 is the region mean of Algorithm 1, and 1 the mean of whole models over all N clients.

    >>> Scheme("frozen", damping=1.0).least_step(clients=8, gamma_min=2)
    0.25
    """

    complement: str = "pruned"
    damping: float = 0.0

    def __post_init__(self) -> None:
        if self.complement not in ERROR_TERMS:
            raise InputError(f"complement must be one of {', '.join(ERROR_TERMS)}; got {self.complement!r}")
        check_number("damping", self.damping, -1e-300, math.nextafter(1.0, 2.0), "a number in [0, 1]")

    @property
    def whole(self) -> bool:
        """Whether clients see the whole model, exactly or with an error, rather than a pruned one."""
        return self.complement != "pruned"

    def least_step(self, clients: int, gamma_min: int) -> float:
        """Return (Gamma/N)^p, the least share of the way to its holders' mean that an entry moves."""
        return float((gamma_min / clients) ** self.damping)

    def error_terms(self, factor: float, error: float) -> dict[str, float]:
        """Return the term of the complement's error by its name; no term if complements are frozen.

        Args:
            factor: The theorem's factor of the error.
            error: The mean over rounds of sum_n e_n.

        >>> Scheme("kept").error_terms(2.0, 0.5), Scheme("frozen").error_terms(2.0, 0.0)
        ({'complement': 1.0}, {})
        """
        name = ERROR_TERMS[self.complement]
        if name is None and error:
            raise InputError(f"error must be 0 if complements are frozen; got {error:.3g}")
        return {name: factor * error if error else 0.0} if name else {}


def complement_error(theta: Params, mask: Mask, values: Mapping[str, Tensor]) -> float:
    """Return the error of one client's complement, e_n = ||(1 - m_n) o (theta - values)||^2.

    Args:
        theta: theta_q, the model before the round.
        mask: m_n; a name left out is kept whole.
        values: What the client has outside its mask, for each tensor in the mask; a name left out is 0.

    >>> theta, mask = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([True, False])}
    >>> complement_error(theta, mask, {}), complement_error(theta, mask, {"w": torch.tensor([0.0, 3.5])})
    (16.0, 0.25)
    """
    return math.fsum(numbers(complement_squares(theta, mask, values)))


def complement_squares(theta: Params, mask: Mask, values: Mapping[str, Tensor]) -> list[Tensor]:
    """Return for each tensor in a mask its share of ``complement_error``, without waiting for a GPU."""
    squares = []
    for name, kept in mask.items():
        tensor = theta[name].double()
        away = tensor - values[name].to(tensor.device).double() if name in values else tensor
        squares.append(torch.where(kept.to(tensor.device), 0.0, away).square().sum())
    return squares


def quantization_error(theta: Params, mask: Mask, bits: int) -> float:
    """Return a bound on the error of a complement that is rounded to the nearest of 2^b levels in each tensor.

    The levels divide the range of a tensor evenly, so that an entry is off by at most half of range / (2^b - 1). One
    more bit divides the bound by about four.

    Args:
        theta: theta_q, the model before the round.
        mask: m_n; a name left out is kept whole.
        bits: b.

    >>> theta, mask = {"w": torch.tensor([0.0, 1.0, 3.0])}, {"w": torch.tensor([True, False, False])}
    >>> quantization_error(theta, mask, bits=2)
    0.5
    """
    check_whole("bits", bits, 1)
    pruned = [(theta[name].double(), ~kept) for name, kept in mask.items() if theta[name].numel()]
    parts = [(tensor.max() - tensor.min()).square() * outside.sum().to(tensor.device) for tensor, outside in pruned]
    return math.fsum(numbers(parts)) / (2 * (2**bits - 1)) ** 2 if parts else 0.0
