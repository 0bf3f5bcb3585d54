"""The cost of training on a device with dense kernels: FLOPs and memory of a step.

``Cost`` counts the entries that a mask keeps. A device whose products are dense saves less. Of a pruned model it saves
only units that are removed whole: it trains the smaller dense model. A client that sees the whole model (with a
complement) holds all of it. It computes the gradient of a tensor for the rows and columns that have a trained entry,
and stores gradients and moments of trained entries only. Layers below the lowest trained one need no backward pass, and
nothing is saved for it there.

The memory of a step is 4 bytes for each parameter that the model has, for each gradient and for each moment, and what
autograd saves of a batch for the backward pass. Not counted: masks and indices, temporary results, the libraries, and
the client's data.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs, copy_of, count
from fedcover.masks.cost import BYTES_PER_VALUE, flops_of_tensor, flops_with_complement
from fedcover.params import FULL, Mask
from fedcover.seeding import seeded
from fedcover.structure.calls import call_model
from fedcover.structure.submodel import Shrinker, SubModel
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class TrainingCost:
    """The cost of one training step on a device with dense kernels; memory is in bytes."""

    flops_per_example: float
    """Floating-point operations of one example's share, as in ``Cost``."""
    parameters: int
    gradients: int
    moments: int
    activations: int
    """What autograd saves of a batch for the backward pass, inputs included, without parameters."""

    @property
    def memory(self) -> int:
        """The sum of parameters, gradients, moments and activations."""
        return self.parameters + self.gradients + self.moments + self.activations


class TrainingCosts:
    """The training costs of the sub-models of one model; masks of equal sizes are computed once.

    Args:
        structure: The traced model.
        batch_size: The number of examples in a batch.
        moments: The number of moments that the optimizer has for each entry, such as 1 for momentum.

    >>> from fedcover.models import MLP; from fedcover.structure.trace import trace
    >>> costs = TrainingCosts(trace(MLP(), torch.zeros(2, 1, 28, 28)))
    >>> full = costs.of({})
    >>> full.parameters, full.gradients, full.memory
    (636040, 636040, 1955480)
    >>> upper = costs.of({"fc1.weight": torch.zeros(200, 784, dtype=torch.bool)}, sees=True)
    >>> upper.parameters, upper.gradients
    (636040, 8840)
    """

    def __init__(self, structure: ModelStructure, batch_size: int = 10, moments: int = 1) -> None:
        self._structure, self._batch_size, self._moments = structure, batch_size, moments
        self._shrinker = Shrinker(structure)
        self._activations: dict[object, int] = {}

    def of(self, mask: Mask, sees: bool = False) -> TrainingCost:
        """Return the cost of a client.

        Args:
            mask: The client's mask.
            sees: Whether it sees the whole model, of which it trains what the mask keeps.
        """
        return self._of_part(mask) if sees else self._of_smaller(self._shrinker.shrink(mask))

    def _of_smaller(self, small: SubModel) -> TrainingCost:
        """Return the cost of a dense model without the units that were removed."""
        sizes = {name: math.prod(shape) for name, shape in zip(self._structure.shapes, small.shape_key, strict=True)}
        flops = sum(flops_of_tensor(self._structure, name, size) for name, size in sizes.items())
        if small.shape_key not in self._activations:
            self._activations[small.shape_key] = self._saved(small.model, frozenset())
        return self._cost(flops, sizes, sizes, self._activations[small.shape_key])

    def _of_part(self, mask: Mask) -> TrainingCost:
        """Return the cost of the whole model, of which a part is trained."""
        sizes = {name: math.prod(shape) for name, shape in self._structure.shapes.items()}
        trained = {name: int(mask[name].sum()) if name in mask else size for name, size in sizes.items()}
        untrained = frozenset(name for name, size in trained.items() if not size)
        computed = {name: _rows_and_columns(kept) for name, kept in mask.items()}
        if untrained not in self._activations:
            self._activations[untrained] = self._saved(self._structure.model, untrained)
        flops = flops_with_complement(self._structure, computed)
        return self._cost(flops, sizes, trained, self._activations[untrained])

    def _cost(
        self, flops: float, sizes: Mapping[str, int], trained: Mapping[str, int], activations: int
    ) -> TrainingCost:
        entries = sum(size for name, size in trained.items() if name not in self._structure.frozen)
        gradients = BYTES_PER_VALUE * entries
        parameters = BYTES_PER_VALUE * sum(sizes.values())
        return TrainingCost(flops, parameters, gradients, self._moments * gradients, activations)

    def _saved(self, model: nn.Module, untrained: frozenset[str]) -> int:
        """Return the bytes that autograd saves of a batch if some tensors are not trained."""
        example = self._structure.example
        return saved_bytes(model, example, untrained) * self._batch_size // count(example)


def training_cost(
    structure: ModelStructure, mask: Mask = FULL, sees: bool = False, batch_size: int = 10, moments: int = 1
) -> TrainingCost:
    """Return the training cost of one client; see ``TrainingCosts``."""
    return TrainingCosts(structure, batch_size, moments).of(mask, sees)


def saved_bytes(model: nn.Module, example: Inputs, untrained: frozenset[str] = frozenset()) -> int:
    """Return the bytes that autograd saves in a forward pass on an example, without parameters.

    Args:
        model: The model; it is not changed.
        example: A batch.
        untrained: Parameters that are not trained.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> saved_bytes(net, torch.zeros(1, 4)), saved_bytes(net, torch.zeros(1, 4), frozenset({"0.weight", "0.bias"}))
    (28, 12)
    """
    scratch = copy.deepcopy(model).train()
    for name, parameter in scratch.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name not in untrained)
    own = {parameter.untyped_storage().data_ptr() for parameter in scratch.parameters()}
    saved: dict[int, Tensor] = {}  # the tensors stay alive, so that no address is used twice

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with (
        seeded(0, "trace"),
        torch.enable_grad(),
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
    ):
        scores = call_model(scratch, copy_of(example))
    del scores
    return sum(tensor.untyped_storage().nbytes() for address, tensor in saved.items() if address not in own)


def _rows_and_columns(kept: Tensor) -> int:
    """Return the entries of the rows and columns that have a kept entry.

    >>> _rows_and_columns(torch.tensor([[True, False, False], [False, False, True], [False, False, False]]))
    4
    """
    if kept.ndim < 2:
        return int(kept.sum())
    rows, columns = kept.flatten(1).any(1), kept.transpose(0, 1).flatten(1).any(1)
    return int(rows.sum()) * int(columns.sum()) * math.prod(kept.shape[2:])
