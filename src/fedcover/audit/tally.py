"""Who was covered how often, counted over rounds: by units where a policy deals in units, by entries elsewhere.

Entries that are always held by the same clients are one cell. For a policy of whole units all kernel entries between
two units are one cell, and a round's counts of a pair of groups are one product of two small matrices.
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
"""For every kind of cell the number of clients that hold each."""


class Tally(ABC):
    """A policy's rounds, played without training, as counts of cells."""

    def __init__(self, policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> None:
        self.policy, self.cohort = policy, cohort
        self.theta: Params = params_of(structure.model)
        self.state = policy.start()

    @abstractmethod
    def play(self, this_round: Round) -> Any:
        """One round, in whatever form takes little room."""

    @abstractmethod
    def cells(self, played: Any) -> Cells:
        """The counts of a round that was played."""

    @abstractmethod
    def covered(self, cells: Cells, tensor: str) -> tuple[int, int]:
        """How many of a tensor's entries lie in cells with a count above 0, and the least count of any."""

    @abstractmethod
    def units(self, cells: Cells) -> tuple[int, int]:
        """How many units have an incoming entry with a count above 0, and how many units there are."""


class EntryTally(Tally):
    """Every entry is a cell of its own: right for any policy."""

    def __init__(self, policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> None:
        super().__init__(policy, structure, cohort)
        self._groups = find_groups(structure)

    def play(self, this_round: Round) -> dict[str, Tensor]:
        """The coverage of every entry by those who train, in one byte each if that is enough."""
        masks, self.state = self.policy.plan(self.theta, self.cohort, this_round, self.state)
        training_options = self.policy.training_options(self.theta, self.cohort, masks, this_round, self.state)
        masks = [
            mask for mask, options in zip(masks, training_options, strict=True) if options is None or not options.rest
        ]
        kind = torch.uint8 if len(self.cohort) < 256 else torch.int32
        return {name: counts.to(kind) for name, counts in coverage_of(masks, self.theta).items()}

    def cells(self, played: Any) -> Cells:
        """The coverage itself."""
        found: Cells = played
        return found

    def covered(self, cells: Cells, tensor: str) -> tuple[int, int]:
        """Counted entry by entry."""
        return int((cells[tensor] > 0).sum()), int(cells[tensor].min())

    def units(self, cells: Cells) -> tuple[int, int]:
        """Counted by the weights into each unit."""
        found = 0
        for group in self._groups:
            held = torch.zeros(group.size, dtype=torch.bool)
            for member in group.members:
                if member.incoming:
                    rows = (cells[member.tensor] > 0).movedim(member.axis, 0).flatten(1).any(1)
                    held[member.units[rows]] = True
            found += int(held.sum())
        return found, sum(group.size for group in self._groups)


class UnitTally(Tally):
    """Cells are units, or pairs of units: right for policies that hold whole units."""

    policy: UnitPolicy

    def __init__(self, policy: UnitPolicy, structure: ModelStructure, cohort: Sequence[Client]) -> None:
        super().__init__(policy, structure, cohort)
        self._places = {name: _place(name, tensor, policy.groups) for name, tensor in self.theta.items()}
        singles = {(number,) for number in range(len(policy.groups))}
        self._kinds = sorted(singles | {kind for kind, _ in self._places.values()})

    def play(self, this_round: Round) -> tuple[list[Tensor], Tensor]:
        """For each group which units each different holding has, and how many clients have that holding."""
        holdings, self.state = self.policy.hold(self.cohort, this_round, self.state)
        distinct = {id(holding): holding for holding in holdings}
        clients = Counter(id(holding) for holding in holdings)
        held = [
            torch.stack([torch.ones(group.size, dtype=torch.bool) if held is None else held for held in each])
            for group, each in zip(self.policy.groups, zip(*distinct.values(), strict=True), strict=True)
        ]
        return held, torch.tensor([float(clients[one]) for one in distinct])

    def cells(self, played: Any) -> Cells:
        """How many clients hold each unit, and each pair of units that some tensor connects."""
        units, clients = played
        held = [each.float() for each in units]
        found: dict[tuple[int, ...], Tensor] = {}
        for kind in self._kinds:
            if len(kind) == 2:
                found[kind] = (held[kind[0]].T * clients) @ held[kind[1]]
            else:
                found[kind] = clients @ held[kind[0]] if kind else clients.sum()
        return found

    def covered(self, cells: Cells, tensor: str) -> tuple[int, int]:
        """Cells counted as often as the tensor has entries in them."""
        kind, entries = self._places[tensor]
        counts = cells[kind]
        return int(entries[counts > 0].sum()), int(counts[entries > 0].min())

    def units(self, cells: Cells) -> tuple[int, int]:
        """Counted unit by unit."""
        singles = [cells[number,] for number in range(len(self.policy.groups))]
        return sum(int((counts > 0).sum()) for counts in singles), sum(len(counts) for counts in singles)


def _place(name: str, tensor: Tensor, groups: Sequence[UnitGroup]) -> tuple[tuple[int, ...], Tensor]:
    """The kind of cell that a tensor's entries lie in, and how many of them lie in each such cell."""
    found = [
        (number, member.axis, torch.bincount(member.units, minlength=group.size))
        for number, group in enumerate(groups)
        for member in group.members
        if member.tensor == name
    ]
    entries = torch.tensor(1)
    each = tensor.numel()
    for _, axis, sizes in found:
        entries = entries[..., None] * sizes
        each //= tensor.shape[axis]
    return tuple(number for number, _, _ in found), entries * each


def tally_of(policy: Policy, structure: ModelStructure, cohort: Sequence[Client]) -> Tally:
    """Return the fastest tally that is right for a bound policy.

    A policy that declares ``holds_whole_units`` is counted by units, except for clients whose classes the policy sees:
    they may hold fewer output rows.
    """
    whole = isinstance(policy, UnitPolicy) and declares(policy, "holds_whole_units")
    if whole and all(client.classes is None for client in cohort):
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
