"""Complements: what a client sees of the global model outside its mask, where it does not train.

    Zero        0, as in Algorithm 1: the client trains a smaller model
    Frozen      theta_q: the client sees the whole model and trains a part of it
    Quantized   theta_q in few bits
    Kept        the client's own copy of the model, renewed only where it trained

Gradients are taken at m o y + (1 - m) o c, where c is the complement. With zeros they have an error that does not
vanish as steps become small; with the values of theta_q it is gone. The costs differ from those of pruning: forward
passes are those of the whole model, and all of it is sent down, at least once. Saved are the upload, the gradients of
weights, and the optimizer's memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import Mask, Params
from fedcover.registry import Registry
from fedcover.training.quantization import BITS, num_rows, quantize

COMPLEMENTS: Registry["Complement"] = Registry("complement")
"""The complements by their names in settings, ``complement.name``."""


class Complement(ABC):
    """The base of complements."""

    sees: ClassVar[bool] = True
    """Whether clients see values outside their masks, and not zeros."""
    keeps_copies: ClassVar[bool] = False
    """Whether every client has a copy of the model from earlier rounds."""
    exact: ClassVar[bool] = False
    """Whether the values are those of theta_q."""
    scheme: ClassVar[str] = "quantized"
    """Its name in ``fedcover.theory.Scheme``: which terms of the bound it causes. By default its error is one."""

    @abstractmethod
    def values(self, theta: Params, copy: Mapping[str, Tensor]) -> Params:
        """Return what a client sees outside its mask, in the shapes of the whole model.

        Args:
            theta: The global parameters.
            copy: The client's copy of the model, if clients have one.
        """

    @abstractmethod
    def bytes_down(self, shape: torch.Size, sent: int) -> int:
        """Return the bytes that a client downloads for a tensor, in addition to its part.

        Args:
            shape: The shape of the tensor.
            sent: The number of entries outside the mask.
        """


@COMPLEMENTS.register("zero")
@dataclass(frozen=True)
class Zero(Complement):
    """Show clients zeros outside their masks, as in Algorithm 1: they train smaller models."""

    sees = False
    scheme = "pruned"

    def values(self, theta: Params, copy: Mapping[str, Tensor]) -> Params:
        """Return zeros."""
        return {name: torch.zeros_like(tensor) for name, tensor in theta.items()}

    def bytes_down(self, shape: torch.Size, sent: int) -> int:
        """Return 0: nothing is sent."""
        return 0


@COMPLEMENTS.register("frozen")
@dataclass(frozen=True)
class Frozen(Complement):
    """Show clients the whole model; what is outside their masks stands still during training."""

    exact = True
    scheme = "frozen"

    def values(self, theta: Params, copy: Mapping[str, Tensor]) -> Params:
        """Return theta itself."""
        return theta

    def bytes_down(self, shape: torch.Size, sent: int) -> int:
        """Return four bytes for each entry."""
        return 4 * sent


@COMPLEMENTS.register("quantized")
@dataclass(frozen=True)
class Quantized(Complement):
    """Show clients the whole model, in few bits outside their masks.

    Args:
        bits: The bits of a value: 8, 4 or 2. Every row of a tensor has its own range.

    Raises:
        InputError: If there is no such number of bits.

    >>> Quantized(4)
    Quantized(bits=4)
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in BITS or isinstance(self.bits, bool):
            raise InputError(f"bits must be one of {', '.join(map(str, BITS))}; got {self.bits!r}")

    def values(self, theta: Params, copy: Mapping[str, Tensor]) -> Params:
        """Return theta in few bits."""
        return {name: quantize(tensor, self.bits).values() for name, tensor in theta.items()}

    def bytes_down(self, shape: torch.Size, sent: int) -> int:
        """Return the bytes of the codes, and two numbers for each row."""
        return -(-sent * self.bits // 8) + 8 * num_rows(shape) if sent else 0


@COMPLEMENTS.register("kept")
@dataclass(frozen=True)
class Kept(Complement):
    """Show each client its own copy of the model, which is renewed only where it trained.

    Devices start with the initial model, receive their part of the global model in each round, and keep what they
    trained. The masks of a client must move, or most of its copy stays as it was.
    """

    keeps_copies = True
    scheme = "kept"

    def values(self, theta: Params, copy: Mapping[str, Tensor]) -> Params:
        """Return the client's copy."""
        return dict(copy)

    def bytes_down(self, shape: torch.Size, sent: int) -> int:
        """Return 0: nothing but its part is sent to a device that has its copy.

        A node without the copy, as at first contact, receives it once; ``wire`` of a deployment's records counts that.
        """
        return 0


def seen(theta: Params, mask: Mask, complement: Mapping[str, Tensor]) -> Params:
    """Return m o theta + (1 - m) o c; what a mask leaves out is whole.

    >>> theta, c = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}
    >>> seen(theta, {"w": torch.tensor([True, False])}, c)["w"].tolist()
    [1.0, 4.0]
    """
    return {n: torch.where(mask[n], t, complement[n].to(t.device)) if n in mask else t for n, t in theta.items()}
