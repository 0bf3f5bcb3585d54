"""Who is in a round's cohort, and with what budget."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcover.budgets import Budget
from fedcover.errors import InputError
from fedcover.seeding import Round


@dataclass(frozen=True)
class Client:
    """One client in one round: who it is, its place in the cohort, and what it can afford."""

    id: int
    slot: int
    budget: Budget
    examples: int = 1
    """How many training examples it has."""
    classes: tuple[int, ...] | None = None
    """The classes that it has examples of; None if the policy does not ask for them."""
    number: int = -1
    """The number by which people know it: its device's own; its id if none is given."""

    def __post_init__(self) -> None:
        if self.number < 0:
            object.__setattr__(self, "number", self.id)


def sample_ids(population: int, size: int, this_round: Round) -> list[int]:
    """``size`` different client ids of 0 .. population-1, in random order, in time that only ``size`` sets.

    >>> sorted(sample_ids(3, 3, Round(index=1, seed=0)))
    [0, 1, 2]
    """
    if not 0 < size <= population:
        raise InputError(f"a cohort of {size} cannot be drawn from {population} clients; make cohort 1 to {population}")
    rng = this_round.generator("cohort")
    chosen: dict[int, None] = {}
    for top in range(population - size, population):  # Floyd's sampling
        pick = int(torch.randint(top + 1, (), generator=rng))
        chosen[top if pick in chosen else pick] = None
    ids = list(chosen)
    return [ids[i] for i in torch.randperm(size, generator=rng).tolist()]


def cohort_of(
    ids: Sequence[int], sizes: Sequence[int], budgets: Sequence[Budget], by: str, numbers: Sequence[int] | None = None
) -> list[Client]:
    """The cohort's clients with their budgets, attached by slot or by client; their numbers are their ids by default.

    >>> [client.number for client in cohort_of([1, 0], [5, 5], [Budget()], "slot", numbers=[70, 30])]
    [70, 30]
    """
    return [
        Client(id, slot, budgets[(slot if by == "slot" else id) % len(budgets)], examples, number=number)
        for slot, (id, examples, number) in enumerate(zip(ids, sizes, ids if numbers is None else numbers, strict=True))
    ]


def places(cohort: Sequence[Client]) -> dict[int, str]:
    """For each client's id its place among those of the same budget: the same from cohort to cohort.

    >>> places([Client(7, 0, Budget(0.5)), Client(3, 1, Budget()), Client(5, 2, Budget(0.5))])
    {7: '0.5 #0', 3: '1.0 #0', 5: '0.5 #1'}
    """
    met: Counter[str] = Counter()
    found = {}
    for client in cohort:
        name = client.budget.exact
        found[client.id] = f"{name} #{met[name]}"
        met[name] += 1
    return found
