"""One time step of the recurrent layers of many clients, forward and backward: LSTM, GRU and plain RNN.

Tensors of a time step are stacks (n, b, units or gates): clients, examples. Gates are in the order of torch. What is
added, multiplied and squashed in one time step is one pass on a GPU (``recurrent_kernels.py``).
"""

from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

BLOCK = 256
"""The number of units that one program of a kernel computes."""


class Before(NamedTuple):
    """What a time step starts from."""

    x: Tensor
    """The products of inputs and weights."""
    product: Tensor
    """The products of hidden states and weights."""
    h: Tensor
    """The hidden states."""
    c: Tensor
    """The cell states of an LSTM."""


class After(NamedTuple):
    """The memory that a time step writes."""

    h: Tensor
    c: Tensor
    saved: Tensor
    """What the gradients read beside the states."""


class Gradients(NamedTuple):
    """What the gradients of a time step are computed from, and where they are written."""

    dh: Tensor
    """The gradient of the hidden states after it, apart from that by the next time step."""
    through: Tensor
    """The gradient of these by the next time step."""
    dc: Tensor
    """The gradient of the cell states, which becomes that of the cell states before."""
    d_x: Tensor
    """Memory for that of ``Before.x``."""
    d_product: Tensor
    """Memory for that of ``Before.product``; the same as ``d_x`` where they are equal."""


class RecurrentCell(ABC):
    """A kind of recurrent layer."""

    gates: ClassVar[int]
    """The numbers of ``Before.x`` for each unit."""
    saved: ClassVar[int] = 0
    """The numbers that are saved for each unit."""
    gates_product: ClassVar[bool] = False
    """Whether a gate multiplies the product of the hidden states, so that its bias cannot be added to the inputs."""

    @abstractmethod
    def step(self, before: Before, after: After) -> None:
        """Take a time step."""

    @abstractmethod
    def gradients(self, before: Before, after: After, at: Gradients) -> Tensor | None:
        """Write the gradients of a time step; return that of ``before.h`` without what comes through the product.

        ``before.x`` and ``before.product`` are not read.
        """


class LstmCell(RecurrentCell):
    """The cell of ``nn.LSTM``. It saves its gates i, f, g and o."""

    gates = saved = 4

    def step(self, before: Before, after: After) -> None:
        """Take a time step."""
        x, product, h, c = before
        if has_kernels(h):
            _launch("lstm_step", h, x, product, c, *after, x.stride(0), h.shape[1])
            return
        i, f, g, o = (_wide(x) + _wide(product)).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        after.c.copy_(f * c + i * g)
        after.h.copy_(o * after.c.tanh())
        after.saved.copy_(torch.cat([i, f, g, o], -1))

    def gradients(self, before: Before, after: After, at: Gradients) -> None:
        """Write the gradients of a time step."""
        if has_kernels(before.h):
            _launch("lstm_gradients", before.h, *at[:3], before.c, after.c, after.saved, at.d_x)
            return
        i, f, g, o = _wide(after.saved).chunk(4, -1)
        dh, squashed = _wide(at.dh) + _wide(at.through), after.c.tanh()
        dc = at.dc + dh * o * (1 - squashed * squashed)
        gates = dc * g * i * (1 - i), dc * before.c * f * (1 - f), dc * i * (1 - g * g), dh * squashed * o * (1 - o)
        at.d_x.copy_(torch.cat(gates, -1))
        at.dc.copy_(dc * f)


class GruCell(RecurrentCell):
    """The cell of ``nn.GRU``. It saves its gates r, z and n, and the product that r multiplies."""

    gates, saved, gates_product = 3, 4, True

    def step(self, before: Before, after: After) -> None:
        """Take a time step."""
        x, product, h, _ = before
        if has_kernels(h):
            _launch("gru_step", h, x, product, h, after.h, after.saved, x.stride(0), h.shape[1])
            return
        (x_r, x_z, x_n), (p_r, p_z, p_n) = _wide(x).chunk(3, -1), _wide(product).chunk(3, -1)
        r, z = (x_r + p_r).sigmoid(), (x_z + p_z).sigmoid()
        n = (x_n + r * p_n).tanh()
        after.h.copy_((1 - z) * n + z * _wide(h))
        after.saved.copy_(torch.cat([r, z, n, p_n], -1))

    def gradients(self, before: Before, after: After, at: Gradients) -> Tensor:
        """Write the gradients of a time step; return that of ``before.h`` without what comes through the product."""
        direct = torch.empty_like(at.through)
        if has_kernels(before.h):
            _launch("gru_gradients", before.h, *at[:2], before.h, after.saved, *at[3:], direct)
            return direct
        r, z, n, p_n = _wide(after.saved).chunk(4, -1)
        dh = _wide(at.dh) + _wide(at.through)
        d_n = dh * (1 - z) * (1 - n * n)
        d_r, d_z = d_n * p_n * r * (1 - r), dh * (_wide(before.h) - n) * z * (1 - z)
        at.d_x.copy_(torch.cat([d_r, d_z, d_n], -1))
        at.d_product.copy_(torch.cat([d_r, d_z, d_n * r], -1))
        return direct.copy_(dh * z)


class RnnCell(RecurrentCell):
    """The cell of ``nn.RNN``.

    Args:
        relu: Whether its nonlinearity is a ReLU, not tanh.
    """

    gates = 1

    def __init__(self, relu: bool) -> None:
        self._relu = relu

    def step(self, before: Before, after: After) -> None:
        """Take a time step."""
        total = before.x + before.product
        after.h.copy_(total.relu() if self._relu else total.tanh())

    def gradients(self, before: Before, after: After, at: Gradients) -> None:
        """Write the gradients of a time step."""
        slope = (after.h > 0).to(after.h.dtype) if self._relu else 1 - after.h * after.h
        at.d_x.copy_((at.dh + at.through) * slope)


CELLS = {"LSTM": LstmCell(), "GRU": GruCell(), "RNN_TANH": RnnCell(relu=False), "RNN_RELU": RnnCell(relu=True)}
"""The cells by the mode of a layer."""


def has_kernels(x: Tensor) -> bool:
    """Return whether kernels, which compute in float32, take the time steps of stacks like this one."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) and find_spec("triton") is not None


def _launch(name: str, h: Tensor, *arguments: Any) -> None:
    """Launch a kernel that computes each unit of stacks like h."""
    from fedcover.engines.vectorized import recurrent_kernels as kernels  # here, since it needs Triton
    from fedcover.engines.vectorized.launch import launch

    launch(getattr(kernels, name), (-(-h.numel() // BLOCK),), *arguments, h.numel(), h.shape[-1], BLOCK)


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gates are computed and cell states are kept: float32, or a wider one."""
    return torch.promote_types(dtype, torch.float32)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_type(x.dtype))
