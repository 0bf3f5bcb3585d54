"""The cost of a sub-model: parameters, multiply-adds, bytes on the wire, FLOPs of a training step."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fedcover.masks.encoding import packed_size_of_product, packed_sizes
from fedcover.params import FixedMask, Mask, axes_of
from fedcover.structure.trace import ModelStructure

BYTES_PER_VALUE = 4
BytesOutside = Callable[[torch.Size, int], int]
"""The bytes that are sent for entries outside a mask, from the shape of a tensor and their number."""


@dataclass(frozen=True)
class Cost:
    """The cost of one sub-model."""

    parameters: int
    macs: float
    """Multiply-adds of one example's forward pass."""
    bytes_down: int
    """Bytes that a client downloads: kept values as float32, and the mask in its cheapest encoding.

    Frozen parameters never change, so a client that has the initial model does not need their values, only their mask.
    """
    bytes_up: int
    """Bytes that a client uploads: only kept values that are trained, since the server has the mask."""
    flops_per_example: float
    """Floating-point operations of one example's share of a training step.

    Each multiply-add counts as two operations in the forward pass, two for the gradient of the weights, and two for
    the gradient of the input. The last two are omitted for tensors that are applied to the raw input, or to the output
    of frozen layers only; those for the gradient of the weights are omitted for frozen tensors.
    """
    emptied: tuple[str, ...] = ()
    """Weight tensors of which no entry is kept."""

    def flops_of_step(self, batch_size: int) -> float:
        """Return the FLOPs of one training step on a batch."""
        return self.flops_per_example * batch_size


def cost_of(structure: ModelStructure, mask: Mask) -> Cost:
    """Return the cost of the sub-model that a mask keeps.

    Args:
        structure: The traced model.
        mask: The entries to keep, by tensor; a tensor that is left out is kept whole.

    >>> import torch; from fedcover.models import MLP; from fedcover.structure.trace import trace
    >>> full = cost_of(trace(MLP(), torch.zeros(2, 1, 28, 28)), {})
    >>> full.parameters, full.macs, full.bytes_up
    (159010, 158800.0, 636040)
    """
    return costs_of(structure, [mask])[0]


def costs_of(structure: ModelStructure, masks: Sequence[Mask], outside: BytesOutside | None = None) -> list[Cost]:
    """Return the costs of several sub-models, with a single synchronisation if the masks are on a GPU.

    Args:
        structure: The traced model.
        masks: One mask for each sub-model.
        outside: For clients that see the whole model and train what their mask keeps: the bytes that are sent for the
            entries outside the mask, from a tensor's shape and their number.
    """
    measured = _measured([(structure, mask) for mask in masks])
    if outside is None:
        return [one.cost for one in measured]
    return [_with_complement(structure, one, outside) for one in measured]


def costs_together(sub_models: Sequence[tuple[ModelStructure, Mask]]) -> list[Cost]:
    """Return the costs of sub-models of several models; masks that do not change store theirs for later calls."""
    return [one.cost for one in _measured(sub_models)]


def kept_entries(sub_models: Sequence[tuple[ModelStructure, Mask]]) -> list[Mapping[str, int]]:
    """Return for each mask the number of kept entries of its tensors, with at most one synchronisation."""
    return [one.kept for one in _measured(sub_models)]


class _Measured(NamedTuple):
    """What is stored with a mask."""

    structure: ModelStructure
    """A reference, so that its id is not reused."""
    cost: Cost
    kept: Mapping[str, int]
    """The number of kept entries of each tensor in the mask."""


def _measured(sub_models: Sequence[tuple[ModelStructure, Mask]]) -> list[_Measured]:
    """Measure the masks of sub-models, as far as they have not stored it."""
    measured: dict[tuple[int, int], _Measured] = {}
    new: dict[tuple[int, int], tuple[ModelStructure, Mask]] = {}
    for structure, mask in sub_models:
        stored = mask.stored(("cost", id(structure))) if isinstance(mask, FixedMask) else None
        if stored is None:
            new[id(structure), id(mask)] = structure, mask
        else:
            measured[id(structure), id(mask)] = stored
    masks = [mask for _, mask in new.values()]
    others = iter(packed_sizes([kept for mask in masks for name, kept in mask.items() if name not in axes_of(mask)]))
    for key, (structure, mask) in new.items():
        axes = axes_of(mask)
        sizes = {
            name: packed_size_of_product(structure.shapes[name], axes[name]) if name in axes else next(others)
            for name in mask
        }
        kept = {name: count for name, (count, _) in sizes.items()}
        measured[key] = _Measured(structure, _cost(structure, sizes), kept)
        if isinstance(mask, FixedMask):
            mask.keep(("cost", id(structure)), measured[key])
    return [measured[id(structure), id(mask)] for structure, mask in sub_models]


@dataclass(frozen=True)
class Extras:
    """What a client downloads and uploads in addition to its values."""

    report: bool = False
    """Whether the client sends one number for each trained entry of the full model."""
    regrow: bool = False
    """Whether the client sends a new mask; it is taken to be as long as the old one."""
    received: int = 0
    """The further numbers that the client receives for each of its trained entries, such as moments."""
    returned: int = 0
    """The further numbers that it returns for each of them."""

    def bytes_of(self, values: int, mask: int, full: int) -> tuple[int, int]:
        """Return the bytes that are added to the download and to the upload.

        Args:
            values: The bytes of the client's trained values.
            mask: The bytes of its mask.
            full: The bytes of the full model's trained values.
        """
        return values * self.received, values * self.returned + full * self.report + mask * self.regrow


NO_EXTRAS = Extras()


def with_extras(cost: Cost, full: Cost, extras: Extras) -> Cost:
    """Return the cost with what a client downloads and uploads in addition to its values.

    Args:
        cost: The cost of the client's sub-model.
        full: The cost of the full model.
        extras: What is added.
    """
    down, up = extras.bytes_of(cost.bytes_up, cost.bytes_down - cost.bytes_up, full.bytes_up)
    if not (down or up):
        return cost
    return replace(cost, bytes_down=cost.bytes_down + down, bytes_up=cost.bytes_up + up)


def _with_complement(structure: ModelStructure, measured: _Measured, outside: BytesOutside) -> Cost:
    """Return the cost of a client that sees the whole model, and trains what its mask keeps.

    Forward passes are those of the whole model, and so are gradients towards inputs, down to the lowest layer of which
    anything is trained. Gradients of weights are those of the trained entries.
    """
    cost, kept = measured.cost, measured.kept
    down = 0
    for name, shape in structure.shapes.items():
        if name in kept and name not in structure.frozen:
            down += outside(torch.Size(shape), math.prod(shape) - kept[name])
    flops = flops_with_complement(structure, kept)
    return replace(cost, macs=structure.work, bytes_down=cost.bytes_down + down, flops_per_example=flops)


def flops_with_complement(structure: ModelStructure, trained: Mapping[str, int]) -> float:
    """Return the FLOPs of one example's share of a training step of a client that sees the whole model.

    Args:
        structure: The traced model.
        trained: The entries of each tensor whose gradients are computed; all of a tensor that is left out.
    """
    first = structure.first_without(frozenset(name for name, count in trained.items() if not count))
    flops = 0.0
    for name, shape in structure.shapes.items():
        size = math.prod(shape)
        own = 0 if name in structure.frozen else trained.get(name, size)
        flops += 2 * structure.macs[name] * (size + own + size * (name not in first))
    return flops


def _cost(structure: ModelStructure, masked: Mapping[str, tuple[int, int]]) -> Cost:
    """Return the cost from each masked tensor's number of kept entries and length of its encoded mask."""
    parameters, sent, macs, flops = 0, 0, 0.0, 0.0
    for name, shape in structure.shapes.items():
        size = masked[name][0] if name in masked else math.prod(shape)
        trained = name not in structure.frozen
        parameters += size
        sent += size * trained
        macs += size * structure.macs[name]
        flops += flops_of_tensor(structure, name, size)
    values = BYTES_PER_VALUE * sent
    emptied = tuple(name for name in structure.weights if masked.get(name, (1, 0))[0] == 0)
    return Cost(parameters, macs, values + sum(length for _, length in masked.values()), values, flops, emptied)


def flops_of_tensor(structure: ModelStructure, name: str, size: int) -> float:
    """Return the FLOPs of one example's share of a training step that some entries of a tensor take part in."""
    passes = 1 + (name not in structure.frozen) + (name not in structure.first)
    return 2 * size * structure.macs[name] * passes
