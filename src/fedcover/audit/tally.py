"""Coverage counted over rounds: by units if a policy holds whole units, otherwise by entries.

Entries that always have the same holders form one cell. For a policy of whole units, all kernel entries between two
units are one cell, and a round's counts for a pair of groups are one product of two small matrices.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.masks.coverage import coverage_of
from fedcover.params import Params, params_of
from fedcover.policies.base import Policy
from fedcover.policies.unit_policy import UnitPolicy
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
        self._groups = find_groups(structure)

    def plan(self, this_round: Round) -> dict[str, Tensor]:
        """Plan one round and return the number of training clients that hold each entry, in one byte if possible."""
        masks, self.state = self.policy.plan(self.theta, self.cohort, this_round, self.state)
        training_options = self.policy.training_options(self.theta, self.cohort, masks, this_round, self.state)
        masks = [
            mask for mask, options in zip(masks, training_options, strict=True) if options is None or not options.rest
        ]
        dtype = torch.uint8 if len(self.cohort) < 256 else torch.int32
        return {name: counts.to(dtype) for name, counts in coverage_of(masks, self.theta).items()}

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
                    covered[member.units[rows]] = True
            count += int(covered.sum())
        return count, sum(group.size for group in self._groups)


class UnitTally(Tally):
    """A tally in which cells are units or pairs of units, valid for policies that hold whole units."""

    policy: UnitPolicy

    def __init__(self, policy: UnitPolicy, structure: ModelStructure, cohort: Sequence[Client]) -> None:
        super().__init__(policy, structure, cohort)
        self._cells_of = {name: _cells_of(name, tensor, policy.groups) for name, tensor in self.theta.items()}
        singles = {(number,) for number in range(len(policy.groups))}
        self._kinds = sorted(singles | {kind for kind, _ in self._cells_of.values()})

    def plan(self, this_round: Round) -> tuple[list[Tensor], Tensor]:
        """Plan one round and return for each group the units of each distinct holding, and its number of clients."""
        holdings, self.state = self.policy.hold(self.cohort, this_round, self.state)
        distinct = {id(holding): holding for holding in holdings}
        clients = Counter(id(holding) for holding in holdings)
        by_group = zip(*distinct.values(), strict=True)
        units = [
            torch.stack([torch.ones(group.size, dtype=torch.bool) if kept is None else kept for kept in rows])
            for group, rows in zip(self.policy.groups, by_group, strict=True)
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
        kind, entries = self._cells_of[tensor]
        counts = cells[kind]
        return int(entries[counts > 0].sum()), int(counts[entries > 0].min())

    def units(self, cells: Cells) -> tuple[int, int]:
        """Count unit by unit."""
        singles = [cells[number,] for number in range(len(self.policy.groups))]
        return sum(int((counts > 0).sum()) for counts in singles), sum(len(counts) for counts in singles)


def _cells_of(name: str, tensor: Tensor, groups: Sequence[UnitGroup]) -> tuple[tuple[int, ...], Tensor]:
    """Return the kind of cell of a tensor's entries, and the number of entries in each such cell."""
    axes = [
        (number, member.axis, torch.bincount(member.units, minlength=group.size))
        for number, group in enumerate(groups)
        for member in group.members
        if member.tensor == name
    ]
    entries = torch.tensor(1)
    rest = tensor.numel()
    for _, axis, sizes in axes:
        entries = entries[..., None] * sizes
        rest //= tensor.shape[axis]
    return tuple(number for number, _, _ in axes), entries * rest


def tally_of(policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> Tally:
    """Return the fastest tally that is valid for a bound policy.

    A policy that declares ``holds_whole_units`` is counted by units, except for clients whose classes the policy sees:
    they may hold fewer output rows.
    """
    by_units = isinstance(policy, UnitPolicy) and declares(policy, "holds_whole_units")
    if by_units and all(client.classes is None for client in cohort):
        return UnitTally(policy, structure, cohort)  # type: ignore[arg-type]
    return EntryTally(policy, structure, cohort)


def declares(policy: Policy, trait: str) -> bool:
    """Return a trait that the policy's own class declares; False if it only inherits it.

    A trait describes the methods of the class that declares it. A class that derives from it may have other methods.
    """
    return trait in vars(type(policy)) and bool(getattr(policy, trait))


def may(policy: Policy, trait: str) -> bool:
    """Return ``moves`` or ``reads_theta`` as the policy's own class declares it; True if it only inherits it."""
    return trait not in vars(type(policy)) or bool(getattr(policy, trait))
