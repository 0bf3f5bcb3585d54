"""Coverage counted over rounds: by units if a policy holds whole units, otherwise by entries.

Entries that always have the same holders form one cell. For a policy of whole units, all kernel entries between two
units are one cell, and a round's counts for a pair of groups are one product of two small matrices.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.masks.coverage import coverage_of
from fedcover.params import Params, params_of
from fedcover.policies.base import Policy, Traits, UnitChooser
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import UnitGroup, find_groups

Cells = Mapping[Any, Tensor]
"""For every kind of cell the number of clients that hold each cell."""


class Tally(ABC):
    """The counts of cells in a policy's rounds, planned without training."""

    def __init__(self, policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> None:
        self.policy, self.cohort = policy, cohort
        self.theta: Params = params_of(structure.model)
        self.state = policy.start()

    @abstractmethod
    def plan(self, this_round: Round) -> Any:
        """Plan one round and return its holders in a compact form."""

    @abstractmethod
    def cells(self, holders: Any) -> Cells:
        """Return the counts of a planned round."""

    @abstractmethod
    def covered(self, cells: Cells, tensor: str) -> tuple[int, int]:
        """Return the number of a tensor's entries in cells with a count above 0, and the least count of any cell."""

    @abstractmethod
    def units(self, cells: Cells) -> tuple[int, int]:
        """Return the number of units with an incoming entry with a count above 0, and the number of all units."""


class EntryTally(Tally):
    """A tally in which every entry is a cell, valid for any policy."""

    def __init__(self, policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> None:
        super().__init__(policy, structure, cohort)
        self._groups = find_groups(policy.prunable(structure))

    def plan(self, this_round: Round) -> dict[str, Tensor]:
        """Plan one round and return the number of training clients that hold each entry, in one byte if possible."""
        plans, self.state = self.policy.plan(self.theta, self.cohort, this_round, self.state)
        dtype = torch.uint8 if len(self.cohort) < 256 else torch.int32
        counts = coverage_of([plan.mask for plan in plans], self.theta)
        return {name: count.to(dtype) for name, count in counts.items()}

    def cells(self, holders: Any) -> Cells:
        """Return the coverage itself."""
        counts: Cells = holders
        return counts

    def covered(self, cells: Cells, tensor: str) -> tuple[int, int]:
        """Count entry by entry."""
        return int((cells[tensor] > 0).sum()), int(cells[tensor].min())

    def units(self, cells: Cells) -> tuple[int, int]:
        """Count by the incoming weights of each unit."""
        count = 0
        for group in self._groups:
            covered = torch.zeros(group.size, dtype=torch.bool)
            for member in group.members:
                if member.incoming:
                    rows = (cells[member.tensor] > 0).movedim(member.axis, 0).flatten(1).any(1)
                    units = member.units[rows]
                    covered[units[units >= 0]] = True
            count += int(covered.sum())
        return count, sum(group.size for group in self._groups)


class UnitTally(Tally):
    """A tally in which cells are units or pairs of units, valid for policies with the trait ``hold``."""

    def __init__(self, policy: Policy, structure: ModelStructure, cohort: Sequence[Client], hold: UnitChooser) -> None:
        super().__init__(policy, structure, cohort)
        self._hold, self._groups = hold, find_groups(policy.prunable(structure))
        self._cells_of = {name: _cells_of(name, tensor, self._groups) for name, tensor in self.theta.items()}
        singles = {(number,) for number in range(len(self._groups))}
        self._kinds = sorted(singles | {kind for cells in self._cells_of.values() for kind, _ in cells})

    def plan(self, this_round: Round) -> tuple[list[Tensor], Tensor]:
        """Plan one round and return for each group the units of each distinct holding, and its number of clients."""
        holdings, self.state = self._hold(self.cohort, this_round, self.state)
        distinct = {id(holding): holding for holding in holdings}
        clients = Counter(id(holding) for holding in holdings)
        by_group = zip(*distinct.values(), strict=True)
        units = [
            torch.stack([torch.ones(group.size, dtype=torch.bool) if kept is None else kept for kept in rows])
            for group, rows in zip(self._groups, by_group, strict=True)
        ]
        return units, torch.tensor([float(clients[key]) for key in distinct])

    def cells(self, holders: Any) -> Cells:
        """Return the number of clients that hold each unit, and each pair of units that a tensor connects."""
        units, clients = holders
        kept = [rows.float() for rows in units]
        counts: dict[tuple[int, ...], Tensor] = {}
        for kind in self._kinds:
            if len(kind) == 2:
                counts[kind] = (kept[kind[0]].T * clients) @ kept[kind[1]]
            else:
                counts[kind] = clients @ kept[kind[0]] if kind else clients.sum()
        return counts

    def covered(self, cells: Cells, tensor: str) -> tuple[int, int]:
        """Count each cell as often as the tensor has entries in it."""
        kinds = self._cells_of[tensor]
        covered = sum(int(entries[cells[kind] > 0].sum()) for kind, entries in kinds)
        return covered, min(int(cells[kind][entries > 0].min()) for kind, entries in kinds)

    def units(self, cells: Cells) -> tuple[int, int]:
        """Count unit by unit."""
        singles = [cells[number,] for number in range(len(self._groups))]
        return sum(int((counts > 0).sum()) for counts in singles), sum(len(counts) for counts in singles)


def _cells_of(name: str, tensor: Tensor, groups: Sequence[UnitGroup]) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return the kinds of cells of a tensor's entries, each with the number of entries in every such cell.

    There are several kinds if an axis has units of several groups, as behind ``torch.cat``.
    """
    along: list[list[tuple[tuple[int, ...], Tensor]]] = []
    for axis, size in enumerate(tensor.shape):
        parts = [
            ((number,), member.counts(group.size))
            for number, group in enumerate(groups)
            for member in group.members
            if (member.tensor, member.axis) == (name, axis)
        ]
        rest = size - sum(int(counts.sum()) for _, counts in parts)
        along.append([*parts, ((), torch.tensor(rest))] if rest else list(parts))
    cells = []
    for choice in product(*along):
        entries = torch.tensor(1)
        for kind, counts in choice:
            entries = entries[..., None] * counts if kind else entries * counts
        cells.append((tuple(number for kind, _ in choice for number in kind), entries))
    return cells


def tally_of(policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> Tally:
    """Return the fastest tally that is valid for a bound policy.

    A policy with the trait ``hold`` is counted by units, except for clients whose classes the policy sees: they may
    hold fewer output rows.
    """
    hold = own_traits(policy).hold
    if hold is not None and all(client.classes is None for client in cohort):
        return UnitTally(policy, structure, cohort, hold)
    return EntryTally(policy, structure, cohort)


def own_traits(policy: Policy) -> Traits:
    """Return the traits that the policy's own class declares; the defaults, which are safe, if it inherits them.

    Traits describe the methods of the class that declares them. A class that derives from it may have other methods.
    """
    return policy.traits() if "traits" in vars(type(policy)) else Traits()
