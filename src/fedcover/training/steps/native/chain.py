"""Chains of layers, which the C library trains."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedcover.training.steps.chains import Geometry
from fedcover.training.steps.rule import Rule


class Op(NamedTuple):
    """A layer in the form that the library takes."""

    kind: int
    """LINEAR, RELU or DROPOUT of ``chains.py``."""
    inputs: int
    outputs: int
    weight: int = -1
    """The first entry of a linear layer's weights in theta."""
    bias: int = -1
    """The first entry of its bias in theta; -1 if it has none."""
    layer: int = 0
    """The number of a dropout layer."""
    least: int = 0
    """The smallest hash for which a dropout layer keeps an entry."""
    geometry: Geometry | None = None
    """The shapes of a layer of images; None in chains without convolutions."""
    scale: float = 0.0
    """The factor of the entries that a dropout layer keeps."""


class _Op(ctypes.Structure):
    """``Op`` of chain.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in Op._fields[:-2]),
        ("geometry", ctypes.c_int64 * 2 * len(Geometry._fields)),
        ("scale", ctypes.c_double),
    )


def _packed(op: Op) -> _Op:
    *integers, geometry, scale = op
    return _Op(*integers, tuple(geometry or ()), scale)


_TENSORS = ("theta", "velocity", "kept", "anchor", "shift", "inputs", "labels", "order")


class _Job(ctypes.Structure):
    """``Job`` of chain.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in ("examples", "count", "batch", "step")),
        ("key", ctypes.c_uint64),
        *((name, ctypes.c_double) for name in ("lr", "momentum", "pull", "clip")),
        ("nesterov", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("first", "last")),
        *((name, ctypes.c_void_p) for name in ("losses", "work")),
    )


@dataclass(frozen=True)
class ChainState:
    """The state of a client: its tensors as flat buffers, and its settings."""

    theta: Tensor
    velocity: Tensor
    kept: Tensor | None
    anchor: Tensor | None
    """The rule's anchors; None for 0."""
    shift: Tensor | None
    """The rule's shifts; None for 0."""
    rule: Rule
    key: int
    step: int


class Chain:
    """A sequence of layers with their parameters in one flat buffer.

    Args:
        library: The C library.
        ops: The layers, from first to last.
    """

    def __init__(self, library: ctypes.CDLL, ops: Sequence[Op]) -> None:
        self._library = library
        self._ops = (_Op * len(ops))(*map(_packed, ops))
        self._work = torch.empty(0)
        self.classes = ops[-1].outputs

    def epochs(
        self, state: ChainState, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int
    ) -> Tensor | None:
        """Take the steps of several epochs in place, and return the losses of the last.

        Return None, with nothing done, if a label is out of range. The library is called once per epoch, so that a
        run can be interrupted.

        Args:
            state: The state of the client, of which theta and velocity are updated.
            inputs: The inputs of all examples.
            labels: The labels of all examples.
            orders: For each epoch, the indices of the client's examples in their order.
            batch_size: The number of examples per step.
        """
        assert inputs.is_contiguous()
        assert labels.is_contiguous()
        assert orders.is_contiguous()
        batch_size = min(batch_size, orders.shape[1])
        losses = torch.empty(-(-orders.shape[1] // batch_size))
        for epoch, order in enumerate(orders):
            ours = (state.theta, state.velocity, state.kept, state.anchor, state.shift)
            job = _Job(
                *(None if tensor is None else tensor.data_ptr() for tensor in (*ours, inputs, labels, order)),
                *(len(labels), len(order), batch_size, state.step + epoch * len(losses), state.key),
                *(state.rule.lr, state.rule.momentum, state.rule.strength, state.rule.clip, state.rule.nesterov),
                *(epoch == 0, epoch == len(orders) - 1, losses.data_ptr()),
            )
            size = self._library.fedcover_chain_size(self._ops, len(self._ops), ctypes.byref(job))
            if len(self._work) < size:
                self._work = torch.empty(size)
            job.work = self._work.data_ptr()
            if self._library.fedcover_chain_epoch(self._ops, len(self._ops), ctypes.byref(job)):
                return None
        return losses
