"""Batch norms whose statistics are those of the real examples of a batch, and not of its padding."""

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedcover.engines.vectorized.convolutions import has_own_forward
from fedcover.errors import InputError


class RealExamples:
    """The real examples of the current batch, which come first in it; all batch norms of a model read them.

    Attributes:
        real: Whether each example has a part in the statistics; None if all have.
        count: The number of these examples.
    """

    def __init__(self) -> None:
        self.real: Tensor | None = None
        self.count: Tensor | None = None

    def set(self, real: Tensor | None) -> None:
        """Set which examples of the next batch are real.

        If none is, the client has finished. Its padding then counts as real: without statistics, the values of deep
        networks would overflow.
        """
        self.real = None if real is None else real | ~real.any()
        self.count = None if self.real is None else self.real.sum(dtype=torch.int32)


class CountedNorm(_BatchNorm):
    """A static batch norm whose statistics are those of the real examples."""

    batch: RealExamples

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
        count = real.sum() * x[0, 0].numel()
        off = x - torch.where(real, x, 0.0).sum(axes, keepdim=True) / count
        variance = torch.where(real, off, 0.0).square().sum(axes, keepdim=True) / count
        normal = off * (variance + self.eps).rsqrt()
        if self.weight is not None:
            normal = normal * self.weight.view(shape)
        if self.bias is not None:
            normal = normal + self.bias.view(shape)
        return normal.to(input.dtype)


class CountedNorm1d(CountedNorm, nn.BatchNorm1d):
    """The form of ``nn.BatchNorm1d``."""


class CountedNorm2d(CountedNorm, nn.BatchNorm2d):
    """The form of ``nn.BatchNorm2d``."""


class CountedNorm3d(CountedNorm, nn.BatchNorm3d):
    """The form of ``nn.BatchNorm3d``."""


COUNTED: dict[type[nn.Module], type[CountedNorm]] = {
    nn.BatchNorm1d: CountedNorm1d,
    nn.BatchNorm2d: CountedNorm2d,
    nn.BatchNorm3d: CountedNorm3d,
}
"""The form of each type of layers that can leave out padding."""


def count_examples(model: nn.Module) -> RealExamples:
    """Have the batch norms of a scratch model read the real examples of a batch, which must be set before each pass.

    Raises:
        InputError: If a batch norm has hooks, or is of another type.
    """
    batch = RealExamples()
    for layer in _of_batches(model):
        if type(layer) not in COUNTED or has_own_forward(layer):
            raise InputError(
                f"engine=vectorized cannot leave out the padding of short batches in a batch norm that is a subclass or"
                f" has hooks, as a {type(layer).__name__} of the model; give every client a multiple of the batch size"
                f" of examples, or use engine=processes"
            )
        layer.__class__ = COUNTED[type(layer)]
        cast(CountedNorm, layer).batch = batch
    return batch


def _of_batches(model: nn.Module) -> Iterator[_BatchNorm]:
    """Yield the batch norms that normalise by the statistics of a batch; others have averages that do not change."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm) and (layer.training or layer.running_mean is None):
            yield layer
