"""Batch norms whose statistics are those of the real examples of a batch, and not of its padding."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcover.engines.vectorized.convolutions import has_own_forward
from fedcover.errors import InputError

COUNTED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""The types of layers that are replaced."""


class RealExamples:
    """The real examples of the current batch, which come first in it; all norms of a model and of its copies share it.

    Attributes:
        real: Whether each example is real; None if all are.
        count: The number of real examples.
    """

    def __init__(self) -> None:
        self.real: Tensor | None = None
        self.count: Tensor | None = None

    def __deepcopy__(self, memo: object) -> "RealExamples":
        return self

    def are(self, real: Tensor | None) -> None:
        """Set which examples of the next batch are real."""
        self.real = real
        self.count = None if real is None else real.sum(dtype=torch.int32)


class CountedNorm(nn.Module):
    """A static batch norm, with the same parameters, whose statistics are those of the real examples.

    Args:
        norm: The layer.
        batch: The real examples.
    """

    def __init__(self, norm: _BatchNorm, batch: RealExamples) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.batch = norm.weight, norm.bias, norm.eps, batch
        self.of_images = isinstance(norm, nn.BatchNorm2d)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalised batch.

        Raises:
            InputError: If the rows of a batch with padding are not the examples.
        """
        if self.batch.real is None:
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        if len(input) != len(self.batch.real):
            raise InputError(
                f"engine=vectorized cannot leave out the padding of short batches where a batch norm takes {len(input)}"
                f" rows of {len(self.batch.real)} examples; give every client a multiple of the batch size of examples,"
                f" or use engine=processes"
            )
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        axes, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        real = self.batch.real.view(-1, *[1] * (x.ndim - 1))
        count = (real.sum() * x[0, 0].numel()).clamp_min(1)
        off = x - torch.where(real, x, 0.0).sum(axes, keepdim=True) / count
        variance = torch.where(real, off, 0.0).square().sum(axes, keepdim=True) / count
        normal = off * (variance + self.eps).rsqrt()
        if self.weight is not None:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)


def count_examples(model: nn.Module) -> RealExamples:
    """Replace the batch norms of a scratch model, in place; return what must be set before each of its passes.

    Batch norms of types of their own, or with a forward pass of their own, stay.
    """
    batch = RealExamples()
    counted: dict[nn.Module, CountedNorm] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # one layer may have several names
            if _is_counted(child):
                setattr(parent, name, counted.setdefault(child, CountedNorm(child, batch)))
    return batch


def _is_counted(layer: nn.Module | None) -> TypeGuard[_BatchNorm]:
    if not isinstance(layer, _BatchNorm):
        return False
    return type(layer) in COUNTED and layer.running_mean is None and not has_own_forward(layer)
