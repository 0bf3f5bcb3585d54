"""LayerItems that policies deal out for each layer: single entries of tensors, or the outputs of layers.

An output is a row of a layer's weight matrix or a filter of a convolution, with its bias and the parameters of the
normalisation that follows. Unlike a unit it does not own the weights out of it, so every parameter belongs to exactly
one output, and a share of the outputs is the same share of the parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcover.params import Params, to_device
from fedcover.structure.depth import TrainedLayer, layers_of
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.structure.units.group import layer_of
from fedcover.structure.units.layers import TRANSPOSED, is_transposed_linear


@dataclass(frozen=True)
class LayerItems:
    """The items of one tensor or layer, which are dealt out together."""

    name: str
    """Name of the tensor or layer."""
    size: int
    """Number of items."""
    tensors: tuple[tuple[str, int | None], ...]
    """Each tensor with the axis along which index i belongs to item i modulo ``size``; None if entries are items."""

    def write(self, masks: Sequence[dict[str, Tensor]], theta: Params, kept: Tensor) -> None:
        """Add the tensors of these items to masks, in place.

        Args:
            masks: Masks to change.
            theta: Parameters, for their shapes.
            kept: A row for each mask that is True at the items to keep; on the device of theta.
        """
        for name, axis in self.tensors:
            shape = theta[name].shape
            if axis is None:
                tensors = kept.reshape(len(masks), *shape)
            else:
                along = [1] * len(shape)
                along[axis] = shape[axis]
                repeated = kept.repeat(1, shape[axis] // self.size).reshape(len(masks), *along)
                tensors = repeated.expand(len(masks), *shape).contiguous()
            for mask, tensor in zip(masks, tensors, strict=True):
                mask[name] = tensor


def masks_of_items(lists: Sequence[LayerItems], theta: Params, kept: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Return the masks of clients, from a row for each client and list that is True at the items to keep."""
    masks: list[dict[str, Tensor]] = [{} for _ in kept[0]]
    for items, rows in zip(lists, kept, strict=True):
        items.write(masks, theta, rows)
    return masks


def kept_items(sizes: Sequence[int], chosen: Sequence[Sequence[Tensor]], device: torch.device) -> list[Tensor]:
    """Return for each list of items a row for each client that is True at its chosen items, on a device.

    Args:
        sizes: The number of items of each list.
        chosen: For each list, the numbers of the items of each client, on the CPU.
        device: The device.
    """
    kept = torch.zeros(len(chosen[0]), sum(sizes), dtype=torch.bool)
    parts = kept.split(list(sizes), 1)
    for part, of_list in zip(parts, chosen, strict=True):
        for row, items in zip(part, of_list, strict=True):
            row[items] = True
    return list(to_device(kept, device).split(list(sizes), 1))


def entries_of_layers(structure: ModelStructure, policy: object, all_tensors: bool = False) -> tuple[LayerItems, ...]:
    """Return the single entries of each hidden weight tensor, or of each tensor of all layers."""
    if all_tensors:
        names: Sequence[str] = [name for layer in layers_of(structure, policy) for name in layer.tensors]
    else:
        names = hidden_weights(structure, policy)
    return tuple(_entries(name, structure) for name in names)


def outputs_of_layers(structure: ModelStructure, policy: object) -> tuple[LayerItems, ...]:
    """Return the outputs of every layer, the output layer among them, in order of use.

    >>> from fedcover.structure.trace import trace
    >>> net = nn.Sequential(nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    >>> [(items.name, items.size) for items in outputs_of_layers(trace(net, torch.zeros(2, 1, 3, 3)), "FedPLT")]
    [('0', 4), ('3', 2)]
    """
    return tuple(items for layer in layers_of(structure, policy) for items in _outputs(layer, structure))


def _outputs(layer: TrainedLayer, structure: ModelStructure) -> Iterator[LayerItems]:
    """Yield the outputs of a layer; tensors whose length does not fit have items of their own."""
    axes = {name: _output_axis(name, structure) for name in layer.tensors}
    lengths = {name: structure.shapes[name][axis] for name, axis in axes.items() if axis is not None}
    own = [length for name, length in lengths.items() if layer_of(name) == layer.name] or [*lengths.values()]
    module = _module_of(layer.tensors[0], structure)
    recurrent = isinstance(module, nn.RNNBase | nn.RNNCellBase)
    size = int(module.hidden_size) if recurrent else min(own, default=0)  # type: ignore[arg-type]
    fitting = tuple((name, axes[name]) for name, length in lengths.items() if size and length % size == 0)
    if fitting:
        yield LayerItems(layer.name, size, fitting)
    for name in layer.tensors:
        if (name, axes[name]) not in fitting:
            axis = axes[name]
            yield LayerItems(name, lengths[name], ((name, axis),)) if axis is not None else _entries(name, structure)


def _entries(name: str, structure: ModelStructure) -> LayerItems:
    size = 1
    for length in structure.shapes[name]:
        size *= length
    return LayerItems(name, size, ((name, None),))


def _output_axis(name: str, structure: ModelStructure) -> int | None:
    """Return the axis of a tensor along which its layer's outputs lie; None for a tensor without axes."""
    module, shape = _module_of(name, structure), structure.shapes[name]
    if len(shape) < 2:
        return 0 if shape else None
    second = isinstance(module, (*TRANSPOSED, nn.Embedding)) or is_transposed_linear(module)
    return 1 if second else 0


def _module_of(name: str, structure: ModelStructure) -> nn.Module:
    return structure.model.get_submodule(name.rpartition(".")[0])
