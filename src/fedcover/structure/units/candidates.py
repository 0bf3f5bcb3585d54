"""Candidate groups of units, from the labels of a forward pass, before they are verified."""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import torch

from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.group import Member, UnitGroup, layer_of
from fedcover.structure.units.labels import Ids
from fedcover.structure.units.tracing import UnitTrace

Pairs = list[tuple[Ids, Ids]]


@dataclass(frozen=True)
class Candidate:
    """Groups of units that are removed independently of each other, or linked by views that split them."""

    finest: tuple[UnitGroup, ...]
    """The groups with the smallest units."""
    reader: "Reader"
    splits: tuple[Ids, ...] = ()
    """The labels of axes that views split, as into attention heads, in the shape of the parts."""

    @property
    def layers(self) -> list[str]:
        """The layers whose outputs the units are."""
        return [layer_of(tensor) for group in self.finest for tensor, _ in sorted(_incoming_axes(group))]

    @property
    def key(self) -> object:
        """The form of the candidate, which equal parts of a model share."""
        groups = tuple(
            (group.size, *((m.axis, m.incoming, m.units.numpy().tobytes()) for m in group.members))
            for group in self.finest
        )
        return groups, tuple(ids.shape for ids in self.splits), self.reader.kinds(self.layers)

    def coarser(self) -> Iterator[tuple[UnitGroup, ...]]:
        """Yield groups with larger units, the smallest first: units that share some coordinates of a split."""
        shapes = {ids.shape for ids in self.splits}
        options: dict[tuple[tuple[str, int, bytes], ...], tuple[UnitGroup, ...]] = {}
        for chosen in [
            *({shape} for shape in shapes),
            *({s for s in shapes if len(s) == n} for n in {*map(len, shapes)}),
        ]:
            parts = len(next(iter(chosen)))
            for axes in (axes for n in range(1, parts) for axes in combinations(range(parts), n)):
                merged = [_merged(ids, axes) for ids in self.splits if ids.shape in chosen]
                groups = self._cut_by(merged)
                if groups:
                    key = tuple((m.tensor, m.axis, m.units.numpy().tobytes()) for g in groups for m in g.members)
                    options[key] = groups
        yield from sorted(options.values(), key=lambda groups: sum(group.size for group in groups), reverse=True)

    def _cut_by(self, merged: Pairs) -> tuple[UnitGroup, ...]:
        """Return the groups in place of the finest ones; none if one of them is a single unit."""
        axes = {axis for group in self.finest for axis in _incoming_axes(group)}
        groups = tuple(group for group in self.reader.groups(merged, axes) if _incoming_axes(group) & axes)
        return groups if all(group.size > 1 for group in groups) else ()


def _incoming_axes(group: UnitGroup) -> set[tuple[str, int]]:
    return {(member.tensor, member.axis) for member in group.members if member.incoming}


def _merged(ids: Ids, axes: Sequence[int]) -> tuple[Ids, Ids]:
    """Return the pairs of labels that become one unit if only some coordinates of a split tell units apart."""
    rest = [axis for axis in range(ids.ndim) if axis not in axes]
    rows = ids.transpose([*axes, *rest]).reshape(int(np.prod([ids.shape[axis] for axis in axes])), -1)
    return rows[:, 1:].ravel(), np.broadcast_to(rows[:, :1], rows[:, 1:].shape).ravel()


class Reader:
    """Reads the groups of units from the labels of a forward pass."""

    def __init__(self, structure: ModelStructure, trace: UnitTrace) -> None:
        self._structure, self._trace = structure, trace
        self._order = {name: place for place, name in enumerate(structure.weights)}

    def candidates(self) -> list[Candidate]:
        """Return the candidates in order of use; groups that split axes link are one candidate.

        Queries, keys and values of attention are linked by their heads: channel c of each head is one unit in all
        three, as in HeteroFL.
        """
        for splits, _ in self._linked(self.groups([])):
            for first, second in pairwise(splits):
                if first.shape == second.shape:
                    self._trace.ledger.same(first, second)
        return [Candidate(groups, self, splits) for splits, groups in self._linked(self.groups([]))]

    def _linked(self, groups: list[UnitGroup]) -> list[tuple[tuple[Ids, ...], tuple[UnitGroup, ...]]]:
        """Return the groups that are linked by views that split axes, and the labels of these axes."""
        ledger = self._trace.ledger
        unit = ledger.solve()
        number = {u: at for at, group in enumerate(groups) for u in self._units_of(group, unit)}
        splits = sorted(ledger.splits.values(), key=lambda ids: (ids.shape, int(ids.flat[0])))
        sets: dict[int, list[Ids]] = {}
        for one, children in ledger.children:
            sets.setdefault(int(unit[one]), []).append(np.append(children, one))
        links = list(range(len(groups)))
        for ids in [*splits, *(np.concatenate(parts) for parts in sets.values())]:
            ends = {_end(links, number[u]) for u in np.unique(unit[ids]).tolist() if u in number}
            for end in ends:
                links[end] = min(ends)
        clusters: dict[int, list[int]] = {}
        for at in range(len(groups)):
            clusters.setdefault(_end(links, at), []).append(at)
        split_units = [{number.get(u) for u in np.unique(unit[ids]).tolist()} for ids in splits]
        return [
            (
                tuple(ids for ids, ends in zip(splits, split_units, strict=True) if ends & set(members)),
                tuple(groups[at] for at in members),
            )
            for members in clusters.values()
        ]

    def groups(self, merged: Pairs, axes: Set[tuple[str, int]] | None = None) -> list[UnitGroup]:
        """Return the groups of units, in order of use.

        Args:
            merged: Pairs of labels that are one unit, beyond what the forward pass states.
            axes: Axes of parameters whose units are wanted; all, if it is left out.
        """
        unit = self._trace.ledger.solve(merged)
        wanted = np.full(len(unit), axes is None)
        for key in axes or ():
            wanted[unit[self._trace.ids[key]]] = True
        for ids, _ in self._trace.ledger.fixed:
            wanted[unit[ids]] = False
        axes_of: dict[int, set[tuple[str, int]]] = {}
        for key, ids in self._trace.ids.items():
            here = unit[ids]
            for one in np.unique(here[wanted[here]]).tolist():
                axes_of.setdefault(one, set()).add(key)
        by_axes: dict[frozenset[tuple[str, int]], set[int]] = {}
        for one, owned in axes_of.items():
            by_axes.setdefault(frozenset(owned), set()).add(one)
        groups = [self._group(owned, units, unit) for owned, units in by_axes.items() if self._incoming(owned)]
        # A single unit that is only a part of an axis, such as a class token among tokens, always stays.
        groups = [
            group for group in groups if group.size > 1 or not any(m.partial for m in group.members if m.incoming)
        ]
        return sorted(groups, key=lambda group: min(self._order[m.tensor] for m in group.members if m.incoming))

    def reasons(self) -> dict[str, str]:
        """Return why the units of layers cannot be removed, by layer."""
        unit, by_layer = self._trace.ledger.solve(), {}
        reason_of: dict[int, str] = {}
        for ids, reason in self._trace.ledger.fixed:
            for one in np.unique(unit[ids]).tolist():
                reason_of.setdefault(one, reason)
        for key in sorted(self._trace.outer):
            reasons = [reason_of[u] for u in unit[self._trace.ids[key]].tolist() if u in reason_of]
            if reasons:
                by_layer[layer_of(key[0])] = reasons[0]
        return by_layer

    def kinds(self, layers: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """Return the classes of layers and of the modules around them."""
        model = self._structure.model
        modules = dict(model.named_modules())
        around = [(modules.get(name, model), modules.get(name.rpartition(".")[0], model)) for name in layers]
        return tuple((type(layer).__qualname__, type(parent).__qualname__) for layer, parent in around)

    def _incoming(self, axes: frozenset[tuple[str, int]]) -> list[tuple[str, int]]:
        return [key for key in axes if key in self._trace.outer and key[0] in self._order]

    def _group(self, axes: frozenset[tuple[str, int]], units: set[int], unit: Ids) -> UnitGroup:
        incoming = set(self._incoming(axes))
        first = min(incoming, key=lambda key: (self._order[key[0]], key[1]))
        along = [u for u in unit[self._trace.ids[first]].tolist() if u in units]
        place = {u: at for at, u in enumerate(dict.fromkeys(along))}
        names = list(self._structure.shapes)
        members = tuple(
            Member(
                key[0],
                key[1],
                torch.tensor([place.get(u, -1) for u in unit[self._trace.ids[key]].tolist()]),
                key in incoming,
            )
            for key in sorted(axes, key=lambda key: (names.index(key[0]), key[1]))
        )
        return UnitGroup(layer_of(first[0]), len(place), members)

    def _units_of(self, group: UnitGroup, unit: Ids) -> set[int]:
        return {
            int(unit[self._trace.ids[member.tensor, member.axis][at]])
            for member in group.members
            for at in (member.units >= 0).nonzero().flatten().tolist()
        }


def _end(links: list[int], at: int) -> int:
    """Return the smallest number that a number is linked with."""
    while links[at] != at:
        at = links[at]
    return at
