"""A chain of simple layers, and its steps by the C library."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LINEAR, RELU, DROPOUT = range(3)


class Op(NamedTuple):
    """A layer, as the library knows it."""

    kind: int
    inputs: int
    outputs: int
    weight: int = -1
    """Where a linear layer's weights begin in theta."""
    bias: int = -1
    """Where its bias begins; -1 if it has none."""
    layer: int = 0
    """A dropout layer's number."""
    least: int = 0
    """The least hash with which it keeps a place."""
    scale: float = 0.0
    """What it multiplies by what it keeps."""


class _Op(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in Op._fields[:-1]), ("scale", ctypes.c_double))


class _Job(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("theta", "velocity", "kept", "inputs", "labels", "order")),
        *((name, ctypes.c_int64) for name in ("examples", "count", "batch", "step")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("lr", "momentum")),
        *((name, ctypes.c_int64) for name in ("first", "last")),
        *((name, ctypes.c_void_p) for name in ("losses", "work")),
    )


@dataclass(frozen=True)
class ChainState:
    """Where a client stands: parameters, momenta and mask as flat stretches of memory, and its settings."""

    theta: Tensor
    velocity: Tensor
    kept: Tensor | None
    lr: float
    momentum: float
    key: int
    step: int


class Chain:
    """Layers one after another, whose parameters begin at certain places of a flat stretch."""

    def __init__(self, library: ctypes.CDLL, ops: Sequence[Op]) -> None:
        self._library = library
        self._ops = (_Op * len(ops))(*(_Op(*op) for op in ops))
        self._work = torch.empty(0)
        self.classes = ops[-1].outputs

    def epochs(
        self, state: ChainState, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int
    ) -> Tensor | None:
        """The losses of the last epoch's steps; None, with nothing done, if a label is out of range.

        There is one call for each epoch, so that a run can be interrupted.
        """
        assert inputs.is_contiguous()
        assert labels.is_contiguous()
        assert orders.is_contiguous()
        batch_size = min(batch_size, orders.shape[1])
        size = self._library.fedcover_chain_size(self._ops, len(self._ops), batch_size)
        if len(self._work) < size:
            self._work = torch.empty(size)
        losses = torch.empty(-(-orders.shape[1] // batch_size))
        for epoch, order in enumerate(orders):
            given = (state.theta, state.velocity, state.kept, inputs, labels, order)
            job = _Job(
                *(None if tensor is None else tensor.data_ptr() for tensor in given),
                *(len(labels), len(order), batch_size, state.step + epoch * len(losses), state.key),
                *(state.lr, state.momentum, epoch == 0, epoch == len(orders) - 1),
                *(losses.data_ptr(), self._work.data_ptr()),
            )
            if self._library.fedcover_chain_epoch(self._ops, len(self._ops), ctypes.byref(job)):
                return None
        return losses
