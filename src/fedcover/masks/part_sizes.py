"""Bounds on what clients hold of a model, as functions of their keep, for budgets in other units than fractions."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedcover.budgets import share
from fedcover.masks.cost import BYTES_PER_VALUE, cost_of
from fedcover.params import Mask
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import find_groups

Outside = Callable[[torch.Size, int], int]
"""Returns the bytes that are sent for entries outside a mask, from a tensor's shape and their number."""
Lists = Mapping[int, Sequence[tuple[int, Sequence[int]]]]
"""For each axis of a tensor, or -1 for its entries: numbers of lists, each with the indices of its first 1, 2, ..."""


def nothing(shape: torch.Size, sent: int) -> int:
    """Return 0: nothing is sent for entries outside a mask."""
    return 0


@dataclass(frozen=True)
class PartBound:
    """What a client holds at most; for each quantity the largest over all masks that it may have."""

    parameters: int
    trained: int
    """Entries that are trained."""
    macs: float
    """Multiply-adds of one example's forward pass, if entries outside the mask are 0."""
    masks: int
    """Bytes of the mask."""
    down: int
    """Bytes of trained values, of the mask, and of what is sent for entries outside it."""


class PartSizes(ABC):
    """The base of bounds. A client with a budget holds a share of every list of items.

    Args:
        structure: The traced model.
        sizes: The number of items of each list.
        units: Whether items are whole units, or outputs of layers, rather than single weights.
    """

    def __init__(self, structure: ModelStructure, sizes: Sequence[int], units: bool) -> None:
        self.structure, self.sizes, self.units = structure, tuple(sizes), units

    smallest: str = ""
    """The smallest part in words; by default one weight or unit in each hidden layer."""
    predictable: bool = True
    """Whether equal keeps take about equal times. They do not if clients train different layers."""

    def counts(self, keep: float) -> tuple[int, ...]:
        """Return the largest number of items of each list at a keep."""
        return tuple(max(1, share(keep, size)) for size in self.sizes)

    @abstractmethod
    def at(self, keep: float, outside: Outside = nothing) -> PartBound:
        """Return what a client holds at most at a keep."""

    def _whole(self, names: Iterable[str]) -> PartBound:
        """Return the bound for tensors that are whole."""
        names = list(names)
        size = {name: math.prod(self.structure.shapes[name]) for name in names}
        trained = sum(size[name] for name in names if name not in self.structure.frozen)
        macs = sum(size[name] * self.structure.macs[name] for name in names)
        return PartBound(sum(size.values()), trained, macs, 0, BYTES_PER_VALUE * trained)


class ListedSizes(PartSizes):
    """A share of every list, each of which belongs to one tensor, or to several that are cut alike.

    Args:
        structure: The traced model.
        sizes: The number of items of each list.
        owned: For each tensor its lists. It keeps the product of what is left along its axes.
        units: Whether items are whole units or outputs.
        uneven: Whether a client may hold one item less of some lists.
    """

    def __init__(
        self,
        structure: ModelStructure,
        sizes: Sequence[int],
        owned: Mapping[str, Lists],
        units: bool,
        uneven: bool = False,
    ) -> None:
        super().__init__(structure, sizes, units)
        self._owned, self._uneven = owned, uneven
        self._rest = self._whole(name for name in structure.shapes if name not in owned)

    def at(self, keep: float, outside: Outside = nothing) -> PartBound:
        """Return what a client holds at most at a keep."""
        most = self.counts(keep)
        if most == self.sizes and not (self._uneven and keep < 1):
            return self._whole(self.structure.shapes)
        least = tuple(max(0, count - 1) for count in most) if self._uneven else most
        rest = self._rest
        parameters, trained, macs, masks, down = rest.parameters, rest.trained, rest.macs, rest.masks, rest.down
        for name, lists in self._owned.items():
            shape, trains = torch.Size(self.structure.shapes[name]), name not in self.structure.frozen
            largest = _kept(shape, lists, most)
            cases = {largest, _kept(shape, lists, least)}
            mask = {kept: longest_encoding(kept, shape, -1 not in lists) for kept in cases}
            sent = {kept: outside(shape, shape.numel() - kept) * trains for kept in cases}
            parameters += largest
            trained += largest * trains
            macs += largest * self.structure.macs[name]
            masks += max(mask.values())
            down += max(BYTES_PER_VALUE * kept * trains + mask[kept] + sent[kept] for kept in cases)
        return PartBound(parameters, trained, macs, masks, down)


class PooledSizes(PartSizes):
    """A share of the entries of several tensors together, in any division among them.

    Args:
        structure: The traced model.
        tensors: The names of the tensors.
        cut: The number of tensors of which a client may hold a part; it holds all or nothing of the others.
        least: The least number of entries that a client holds.
    """

    def __init__(
        self, structure: ModelStructure, tensors: Sequence[str], cut: int | None = None, least: int = 1
    ) -> None:
        self._shapes = {name: torch.Size(structure.shapes[name]) for name in tensors}
        total = sum(shape.numel() for shape in self._shapes.values())
        super().__init__(structure, [total], units=False)
        self._total, self._cut = total, len(tensors) if cut is None else cut
        self.predictable, self._least = cut is None, least
        self._rest = self._whole(name for name in structure.shapes if name not in self._shapes)

    def counts(self, keep: float) -> tuple[int, ...]:
        """Return the largest number of entries at a keep; where all tensors are cut, each has at least one."""
        return (max(len(self._shapes) if self.predictable else self._least, share(keep, self._total)),)

    def at(self, keep: float, outside: Outside = nothing) -> PartBound:
        """Return what a client holds at most at a keep."""
        (amount,) = self.counts(keep)
        if amount == self._total:
            return self._whole(self.structure.shapes)
        rest, frozen = self._rest, self.structure.frozen
        bitmaps = sorted((-(-shape.numel() // 8) for shape in self._shapes.values()), reverse=True)
        masks = len(self._shapes) + min(sum(bitmaps[: self._cut]), *_listed(amount, self._total))
        # An even division leaves entries of every tensor outside, and so has the most rows with ranges of their own.
        sent = sum(
            1 + outside(shape, shape.numel() - amount * shape.numel() // self._total)
            for name, shape in self._shapes.items()
            if name not in frozen
        )
        values = BYTES_PER_VALUE * amount
        return PartBound(
            rest.parameters + amount,
            rest.trained + amount,
            rest.macs + self._most_macs(amount),
            masks,
            rest.down + values + masks + (sent if outside is not nothing else 0),
        )

    def _most_macs(self, amount: int) -> float:
        """Return the multiply-adds of so many entries of the most expensive tensors."""
        macs, left = 0.0, amount
        for name in sorted(self._shapes, key=lambda one: self.structure.macs[one], reverse=True):
            taken = min(left, self._shapes[name].numel())
            macs, left = macs + taken * self.structure.macs[name], left - taken
        return macs


class MaskedSizes(PartSizes):
    """What the masks of a policy keep, which follow from a keep only.

    Args:
        structure: The traced model.
        mask_of: Returns the mask of a keep.
        least_keep: Returns the least keep that has the same mask as another.
        units: Whether masks remove whole units.
        smallest: The smallest part in words.
    """

    STEPS = 10**6
    """The number of keeps that are told apart."""

    def __init__(
        self,
        structure: ModelStructure,
        mask_of: Callable[[float], Mask],
        least_keep: Callable[[float], float],
        units: bool,
        smallest: str,
    ) -> None:
        super().__init__(structure, [self.STEPS], units)
        self._mask_of, self._least_keep, self.smallest = mask_of, least_keep, smallest
        self.predictable = False

    def counts(self, keep: float) -> tuple[int, ...]:
        """Return the least keep with the same mask, in millionths."""
        return (max(1, share(self._least_keep(keep), self.STEPS)),)

    def at(self, keep: float, outside: Outside = nothing) -> PartBound:
        """Return what a client holds at a keep; nothing is sent for entries outside its mask."""
        cost = cost_of(self.structure, self._mask_of(keep))
        trained, masks = cost.bytes_up // BYTES_PER_VALUE, cost.bytes_down - cost.bytes_up
        return PartBound(cost.parameters, trained, cost.macs, masks, cost.bytes_down)


def _kept(shape: torch.Size, lists: Lists, counts: Sequence[int]) -> int:
    """Return the number of entries of a tensor that are kept, from the number of items of each list."""
    left = 1 if -1 in lists else math.prod(n for axis, n in enumerate(shape) if axis not in lists)
    for axis, several in lists.items():
        whole = shape.numel() if axis < 0 else shape[axis]  # of which some may belong to no list
        left *= whole - sum(ends[-1] - (ends[counts[n] - 1] if counts[n] else 0) for n, ends in several)
    return left


def sizes_of_weights(structure: ModelStructure) -> PartSizes:
    """Return the bound for shares of the entries of every hidden weight tensor."""
    sizes = {name: math.prod(structure.shapes[name]) for name in structure.hidden}
    return sizes_of_items(structure, [(size, [(name, None)]) for name, size in sizes.items()])


def sizes_of_units(structure: ModelStructure) -> PartSizes:
    """Return the bound for shares of the units of every group; a unit owns what goes into it and out of it."""
    owned: dict[str, dict[int, list[tuple[int, Sequence[int]]]]] = {}
    sizes: list[int] = []
    for group in find_groups(structure):
        for member in group.members:
            # If units own unequal parts, the largest are taken: no choice of units costs more.
            each = member.counts(group.size).sort(descending=True).values
            lists = owned.setdefault(member.tensor, {}).setdefault(member.axis, [])
            lists.append((len(sizes), each.cumsum(0).tolist()))
        sizes.append(group.size)
    return ListedSizes(structure, sizes, owned, units=True)


def sizes_of_items(
    structure: ModelStructure,
    lists: Iterable[tuple[int, Iterable[tuple[str, int | None]]]],
    units: bool = False,
    uneven: bool = False,
) -> PartSizes:
    """Return the bound for shares of lists whose items own equal parts of tensors.

    Args:
        structure: The traced model.
        lists: The number of items of each list, and its tensors, each with the axis along which items lie; None if the
            entries of the tensor are the items.
        units: Whether items are outputs of layers.
        uneven: Whether a client may hold one item less of some lists.
    """
    owned: dict[str, Lists] = {}
    sizes: list[int] = []
    for size, tensors in lists:
        for name, axis in tensors if size else ():
            shape, along = structure.shapes[name], -1 if axis is None else axis
            length = math.prod(shape) if axis is None else shape[axis]
            owned[name] = {along: [(len(sizes), range(length // size, length + 1, length // size))]}
        sizes += [size] if size else []
    return ListedSizes(structure, sizes, owned, units, uneven)


def longest_encoding(kept: int, shape: Sequence[int], product: bool) -> int:
    """Return the largest length of ``encoding.pack`` over all masks that keep this many entries of a tensor.

    A list of gaps takes one byte for each gap, and one more for each power 2^7, 2^14, ... that a gap reaches. The gaps
    sum to at most the number of entries that are not listed, which limits the number of long gaps.

    Args:
        kept: The number of entries that are kept.
        shape: The shape of the tensor.
        product: Whether the mask is an outer product.
    """
    size = math.prod(shape)
    if kept >= size:
        return 1
    products = [sum(-(-n // 8) for n in shape)] if product and len(shape) > 1 else []
    return 1 + min(-(-size // 8), *_listed(kept, size), *products)


def _listed(kept: int, size: int) -> list[int]:
    """Return the largest lengths of the lists of kept and of dropped entries."""
    return [gaps + sum(min(gaps, (size - gaps) >> 7 * k) for k in range(1, 9)) for gaps in (kept, size - kept)]
