"""The clients of a round's cohort, and their budgets."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedcover.budgets import Budget
from fedcover.errors import InputError
from fedcover.seeding import Round


@dataclass(frozen=True)
class Client:
    """One client in one round.

    >>> Client(id=7, slot=0, budget=Budget(0.5)).number
    7
    """

    id: int
    """Index of the client in the population."""
    slot: int
    """Position in the cohort, from 0."""
    budget: Budget
    """The part of the model that it keeps."""
    examples: int = 1
    """Number of its training examples."""
    classes: tuple[int, ...] | None = None
    """Classes of its examples; None if the policy does not need them."""
    number: int = -1
    """Number that identifies it to users, such as that of its device; by default its id."""

    def __post_init__(self) -> None:
        if self.number < 0:
            object.__setattr__(self, "number", self.id)


def sample_ids(population: int, size: int, this_round: Round) -> list[int]:
    """Return ``size`` different client ids of 0 .. population-1, in random order, in time O(size).

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
    """Return the clients of a cohort.

    Args:
        ids: Id of the client in each slot.
        sizes: Number of examples of the client in each slot.
        budgets: Budgets, of the slots or of the clients.
        by: ``slot`` or ``client``.
        numbers: Number of the client in each slot; by default its id.

    >>> [client.number for client in cohort_of([1, 0], [5, 5], [Budget()], "slot", numbers=[70, 30])]
    [70, 30]
    """
    return [
        Client(id, slot, budgets[(slot if by == "slot" else id) % len(budgets)], examples, number=number)
        for slot, (id, examples, number) in enumerate(zip(ids, sizes, ids if numbers is None else numbers, strict=True))
    ]


def places(cohort: Sequence[Client]) -> dict[int, str]:
    """Return, by client id, a key made of its budget and its position among the clients with that budget.

    The keys do not depend on which clients are drawn, so they identify the same place in every cohort.

    >>> places([Client(7, 0, Budget(0.5)), Client(3, 1, Budget()), Client(5, 2, Budget(0.5))])
    {7: '0.5 #0', 3: '1.0 #0', 5: '0.5 #1'}
    """
    counts: Counter[str] = Counter()
    keys = {}
    for client in cohort:
        name = client.budget.exact
        keys[client.id] = f"{name} #{counts[name]}"
        counts[name] += 1
    return keys
