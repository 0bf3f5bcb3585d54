"""Labels: for every tensor of a forward pass, the unit that each index of an axis belongs to.

Every index of every axis of a parameter gets a number of its own. Operations pass these numbers on and state which of
them must be the same unit, such as output j of a layer and input j of the next one. A view that splits an axis into
several gives one label to each combination of their indices: a ``Factor`` has then several axes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Axis = Any
"""The number of an axis of a tensor, or its name in an operation."""


@dataclass(frozen=True)
class Factor:
    """The labels of one axis of a tensor, or of several axes together."""

    axes: tuple[Axis, ...]
    ids: Ids
    """One number for each combination of indices of the axes."""

    def renamed(self, names: Mapping[Axis, Axis]) -> "Factor":
        """Return the factor with other names of its axes."""
        return Factor(tuple(names[axis] for axis in self.axes), self.ids)

    def simplified(self) -> "Factor | None":
        """Return the factor without axes along which the labels are constant; None if no axis is left."""
        axes, ids = list(self.axes), np.asarray(self.ids)
        for place in range(len(axes) - 1, -1, -1):
            first = ids.take([0], place)
            if len(axes) > 1 and bool((ids == first).all()):
                ids = ids.take([0], place).squeeze(place)
                del axes[place]
        return Factor(tuple(axes), ids)


@dataclass(frozen=True)
class Operand:
    """A tensor in an operation: the size of each of its axes under a name, and the labels of some of them."""

    sizes: Mapping[Axis, int]
    factors: tuple[Factor, ...]

    def at(self, axis: Axis) -> Factor | None:
        """Return the factor of an axis; None if the axis has no units."""
        return next((factor for factor in self.factors if axis in factor.axes), None)


class Ledger:
    """The labels of a forward pass, and what operations state about them."""

    def __init__(self) -> None:
        self.count = 0
        self.edges: list[tuple[Ids, Ids]] = []
        """Pairs of labels that are the same unit."""
        self.fixed: list[tuple[Ids, str]] = []
        """Labels that cannot be removed, with the reason."""
        self.splits: dict[bytes, Ids] = {}
        """Labels of an axis that a view splits, in the shape of its parts."""
        self._sets: dict[bytes, int] = {}
        self.children: list[tuple[int, Ids]] = []
        """Labels that stand for a set of other labels, as a head stands for its channels."""

    def fresh(self, *shape: int) -> Ids:
        """Return new labels."""
        size = int(np.prod(shape))
        ids = np.arange(self.count, self.count + size, dtype=np.int64).reshape(shape)
        self.count += size
        return ids

    def fix(self, ids: Ids, reason: str) -> None:
        """State that these units cannot be removed."""
        self.fixed.append((ids.ravel(), reason))

    def same(self, first: Ids, second: Ids) -> None:
        """State that labels are pairwise the same unit."""
        if first.shape != second.shape:
            raise ValueError(f"labels of shapes {first.shape} and {second.shape} cannot be the same units")
        if first is not second and not np.array_equal(first, second):
            self.edges.append((first.ravel(), second.ravel()))

    def split(self, ids: Ids) -> None:
        """Record the labels of an axis that a view has split."""
        self.splits.setdefault(repr(ids.shape).encode() + ids.tobytes(), ids)

    def onto(self, factor: Factor, axes: Sequence[Axis]) -> Ids:
        """Return labels for some axes of a factor; each stands for all labels that have its indices.

        It is the same unit as these labels only if they are all one unit.
        """
        order = [factor.axes.index(axis) for axis in axes]
        rest = [place for place in range(len(factor.axes)) if place not in order]
        ids = factor.ids.transpose(order + rest)
        if not rest:
            return ids
        shape = ids.shape[: len(order)]
        rows = ids.reshape(int(np.prod(shape)), -1)
        if bool((rows == rows[:, :1]).all()):
            return np.ascontiguousarray(rows[:, 0]).reshape(shape)
        numbers = np.empty(len(rows), dtype=np.int64)
        for place, row in enumerate(np.sort(rows, axis=1)):
            key = row.tobytes()
            if key not in self._sets:
                self._sets[key] = int(self.fresh(1)[0])
                self.children.append((self._sets[key], np.unique(row)))
            numbers[place] = self._sets[key]
        return numbers.reshape(shape)

    def fix_axis(self, factors: Iterable[Factor], axis: Axis, reason: str) -> None:
        """State that no index of an axis can be removed."""
        for factor in factors:
            if axis in factor.axes:
                self.fix(self.onto(factor, [axis]), reason)

    def combine(self, operands: Sequence[Operand], out: Mapping[Axis, int], reason: str) -> tuple[Factor, ...]:
        """Return the labels of an operation in which operands meet along the axes that they share.

        Args:
            operands: Its operands; an axis of size 1 is broadcast.
            out: The axes of its result, with their sizes; other axes are summed over.
            reason: Why units cannot be removed where another operand has an axis without units.
        """
        for axis in {axis: None for operand in operands for axis in operand.sizes}:
            size = max(operand.sizes.get(axis, 0) for operand in operands)
            present = [operand.at(axis) for operand in operands if operand.sizes.get(axis) == size]
            labelled = [factor for factor in present if factor is not None]
            if len(labelled) < len(present):
                self.fix_axis(labelled, axis, reason)
                continue
            for factor in labelled[1:]:
                shared = [one for one in labelled[0].axes if one in factor.axes]
                self.same(self.onto(labelled[0], shared), self.onto(factor, shared))
        kept: list[Factor] = []
        for operand in operands:
            for factor in operand.factors:
                axes = tuple(axis for axis in factor.axes if out.get(axis) == operand.sizes[axis])
                if axes and not any(set(axes) <= set(other.axes) for other in kept):
                    kept = [other for other in kept if not set(other.axes) < set(axes)]
                    kept.append(Factor(axes, self.onto(factor, axes)))
        return tuple(kept)

    def solve(self, merged: Sequence[tuple[Ids, Ids]] = ()) -> Ids:
        """Return the unit of each label, as the smallest label of the same unit.

        Args:
            merged: Further pairs that are the same unit.
        """
        pairs = [*self.edges, *merged]
        waiting = dict(self.children)
        unit = np.arange(self.count, dtype=np.int64)
        left = np.concatenate([a for a, _ in pairs]) if pairs else np.empty(0, np.int64)
        right = np.concatenate([b for _, b in pairs]) if pairs else np.empty(0, np.int64)
        while True:
            unit = _components(unit, left, right)
            joined = [one for one, children in waiting.items() if len(np.unique(unit[children])) == 1]
            if not joined:
                return unit
            left = np.concatenate([left, np.array(joined)])
            right = np.concatenate([right, np.array([waiting.pop(one)[0] for one in joined])])


def _components(unit: Ids, left: Ids, right: Ids) -> Ids:
    """Return the smallest label that each label is connected with."""
    while True:
        a, b = unit[left], unit[right]
        low, after = np.minimum(a, b), unit.copy()
        np.minimum.at(after, a, low)
        np.minimum.at(after, b, low)
        while not np.array_equal(after, after[after]):
            after = after[after]
        if np.array_equal(after, unit):
            return unit
        unit = after


def reshaped(ledger: Ledger, factors: Sequence[Factor], before: Sequence[int], after: Sequence[int]) -> list[Factor]:
    """Return the labels of a view: axes may be split, or merged with axes that have no units."""
    blocks = _blocks(before, after)
    where = {axis: number for number, (old, _) in enumerate(blocks) for axis in old}
    # An axis of size 1 has no units to follow where it is merged or split off.
    single = {axis for old, new in blocks if len(old) == len(new) == 1 for axis in old}
    factors = [factor for factor in factors if factor.ids.size > 1 or set(factor.axes) <= single]
    touched: dict[int, int] = {}
    for factor in factors:
        for number in {where[axis] for axis in factor.axes}:
            touched[number] = touched.get(number, 0) + 1
    result: list[Factor] = []
    for factor in factors:
        mine = sorted({where[axis] for axis in factor.axes})
        if any(touched[n] > 1 and len(blocks[n][0]) > 1 for n in mine):
            ledger.fix(factor.ids, "they are flattened together with other units into pairs of both")
            continue
        old = [axis for n in mine for axis in blocks[n][0]]
        new = tuple(axis for n in mine for axis in blocks[n][1])
        ids = factor.ids.transpose([factor.axes.index(axis) for axis in old if axis in factor.axes])
        ids = ids.reshape([before[axis] if axis in factor.axes else 1 for axis in old])
        ids = np.broadcast_to(ids, [before[axis] for axis in old]).reshape([after[axis] for axis in new])
        view = Factor(new, np.ascontiguousarray(ids)).simplified()
        if view is not None:
            if len(factor.axes) == 1 < len(view.axes):
                ledger.split(view.ids)
            result.append(view)
    return result


def _blocks(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of old axes and of new axes with the same number of indices."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        old: list[int] = []
        new: list[int] = []
        a = b = 1
        while not old or not new or a != b:
            if i < len(before) and (a <= b or j >= len(after)):
                a *= before[i]
                old.append(i)
                i += 1
            elif j < len(after):
                b *= after[j]
                new.append(j)
                j += 1
            else:
                break
        blocks.append((old, new))
    return blocks
