"""Weight-complete sub-models: within one cycle every pair of connected units, and so every weight, is held.

The units of every group lie in b >= 1/r blocks, and a sub-model holds one block of each group. Sub-model (i, j) of b^2
takes the block that a column of an orthogonal array of strength 2 names: i, j, i + j, i + 2j, ... modulo b. Any two
columns run through all b^2 pairs of blocks, so groups that some tensor connects need different columns: a proper
colouring of the graph of groups. A chain of layers needs only i and j; a residual net whose shortcuts are
convolutions also needs i + j; more columns need a b whose divisors are large enough, so b may be raised.

A tensor with one group on both its axes needs every pair of units of the group itself. There the group lies in 2b
half-blocks and a sub-model holds two of them. The pairs of 2b half-blocks fall into 2b - 1 perfect matchings (as in a
round-robin tournament), each of which is a list of b blocks; a cycle contains the b^2 sub-models once per matching.
So a cycle has b^2 sub-models, or (2b - 1) b^2 if a group is tied to itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.policies.base import HeldUnits, State, Traits
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import UnitPolicy, unit_mask, units_for, width_of
from fedcover.seeding import Round
from fedcover.structure.units import UnitGroup


@dataclass(frozen=True)
class Cycle:
    """The sub-models of one width, in the order in which clients get them."""

    groups: tuple[UnitGroup, ...]
    width: float
    blocks: int
    """b: the number of blocks of every group."""
    columns: tuple[int, ...]
    """The column of each group: 0 for i, 1 for j, l + 1 for i + lj."""
    tied: frozenset[int]
    """The groups that lie along two axes of one tensor."""

    def __len__(self) -> int:
        return self.blocks**2 * (2 * self.blocks - 1 if self.tied else 1)

    def __getitem__(self, number: int) -> HeldUnits:
        if not 0 <= number < len(self):
            raise IndexError(f"sub-model {number} of a cycle of {len(self)}")
        matching, number = divmod(number, self.blocks**2)
        turn, i = divmod(number, self.blocks)
        j = (i + turn) % self.blocks  # so that b sub-models in a row hold every unit of groups with columns i and j
        return tuple(
            unit_mask(group.size, self._units(at, group.size, matching, block(column, i, j, self.blocks)))
            for at, (group, column) in enumerate(zip(self.groups, self.columns, strict=True))
        )

    def _units(self, at: int, size: int, matching: int, place: int) -> Tensor:
        if at not in self.tied:
            return window(place, self.blocks, size, units_for(self.width, size))
        halves = pair_of(matching, place, self.blocks)
        length = half_of(self.width, size)
        return torch.cat([window(half, 2 * self.blocks, size, length) for half in halves])


def cycle_of(groups: tuple[UnitGroup, ...], width: float) -> Cycle:
    """Return the cycle of one width, with the least b that serves all groups."""
    edges = connected(groups)
    tied = frozenset(a for a, b in edges if a == b)
    columns = colours(len(groups), edges)
    least = max(
        [ceil(1 / width - 1e-9)]
        + [ceil(groups[at].size / (2 * half_of(width, groups[at].size))) for at in tied if width < 1]
    )
    return Cycle(groups, width, usable(least, max(columns, default=0) + 1), columns, tied if width < 1 else frozenset())


def connected(groups: Sequence[UnitGroup]) -> set[tuple[int, int]]:
    """Return the pairs of groups (by number, the smaller first) that lie along two axes of one tensor."""
    along: dict[str, list[tuple[int, int]]] = {}
    for number, group in enumerate(groups):
        for member in group.members:
            along.setdefault(member.tensor, []).append((member.axis, number))
    return {
        (min(a, b), max(a, b)) for places in along.values() for axis, a in places for other, b in places if axis < other
    }


def colours(count: int, edges: set[tuple[int, int]]) -> tuple[int, ...]:
    """Return a proper colouring by DSATUR, which uses two colours wherever two are enough.

    >>> colours(4, {(0, 1), (1, 2), (2, 3)})
    (1, 0, 1, 0)
    """
    beside: Mapping[int, set[int]] = {
        at: {a + b - at for a, b in edges if at in (a, b) and a != b} for at in range(count)
    }
    colour_of: dict[int, int] = {}
    while len(colour_of) < count:
        taken = {
            at: {colour_of[other] for other in beside[at] if other in colour_of}
            for at in range(count)
            if at not in colour_of
        }
        at = max(taken, key=lambda one: (len(taken[one]), len(beside[one]), -one))
        colour_of[at] = next(colour for colour in range(count) if colour not in taken[at])
    return tuple(colour_of[at] for at in range(count))


def usable(blocks: int, columns: int) -> int:
    """Return the least b >= ``blocks`` for which this many columns are an orthogonal array of strength 2.

    Columns i + lj and i + mj meet in all pairs if l - m has an inverse modulo b. For up to three columns every b is
    usable; for more, the divisors of b must be at least the number of columns minus one.

    >>> usable(4, 3), usable(4, 4), usable(6, 5)
    (4, 5, 7)
    """
    while blocks > 1 and any(blocks % divisor == 0 for divisor in range(2, columns - 1)):
        blocks += 1
    return blocks


def block(column: int, i: int, j: int, blocks: int) -> int:
    """Return the entry of the orthogonal array in row (i, j)."""
    return (i, j)[column] if column < 2 else (i + (column - 1) * j) % blocks


def window(place: int, blocks: int, size: int, length: int) -> Tensor:
    """Return the units of one block: ``length`` units from its start, which reach the start of the next block."""
    return (torch.arange(length) + place * size // blocks) % size


def half_of(width: float, size: int) -> int:
    """Return the number of units of a half-block, at least 1: a group tied to itself holds at least two units."""
    return max(1, units_for(width, size) // 2)


def pair_of(matching: int, place: int, blocks: int) -> tuple[int, int]:
    """Return pair number ``place`` of a perfect matching of 2b half-blocks, by the circle method.

    >>> [[pair_of(m, p, 2) for p in range(2)] for m in range(3)]
    [[(3, 0), (1, 2)], [(3, 1), (2, 0)], [(3, 2), (0, 1)]]
    """
    last = 2 * blocks - 1
    return (last, matching) if place == 0 else ((matching + place) % last, (matching - place) % last)


@dataclass(frozen=True)
class WeightComplete(UnitPolicy):
    """Blocks of units by an orthogonal array, dealt to the clients of a cohort one after another.

    Each width has its own cycle. The state is the position in each cycle.
    """

    def traits(self) -> Traits:
        """Declare that the units of ``hold`` decide the masks."""
        return replace(super().traits(), reads_theta=False, hold=self.hold)

    def hold(self, cohort: Sequence[Client], this_round: Round, state: State) -> tuple[list[HeldUnits], State]:
        """Return the next sub-models of each width's cycle, and the positions after them."""
        cycles: dict[float, Cycle] = {}
        positions = dict(state)
        units: list[HeldUnits] = []
        for client in cohort:
            width = width_of(client.budget, self)
            if width not in cycles:
                cycles[width] = cycle_of(self.groups, width)
            key = f"dealt {width!r}"
            number = int(positions[key]) if key in positions else 0
            units.append(cycles[width][number])
            positions[key] = torch.tensor((number + 1) % len(cycles[width]))
        return units, positions


@register("weight_complete")
def weight_complete() -> WeightComplete:
    """Weight-complete sub-models: blocks of units chosen so that a cycle of about 1/r^2 of them holds every weight."""
    return WeightComplete()
