"""The cohort of a round: which clients are drawn, and what each can afford."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from fedcover.aggregation.label_weights import assign_patterns
from fedcover.budgets import Budget, Budgets, Codebook
from fedcover.clients import Client, cohort_of
from fedcover.errors import InputError, check_whole
from fedcover.federation.checkpoint import State
from fedcover.federation.sampling import checked_ids
from fedcover.seeding import Round

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

Shares = Mapping[int, float]
"""The shares of their budgets that some clients get in a round, by id; others get all of them."""
NO_SHARES: Shares = MappingProxyType({})


def check_cohort(federation: "Federation") -> None:
    """Raise InputError if cohorts of the federation's size cannot be drawn."""
    clients, size = len(federation.clients), federation.cohort
    check_whole("cohort", size, 1)
    if size > clients:
        raise InputError(f"cohort must be from 1 to the number of clients, {clients}; got {size}")
    federation.sampling.check(federation.clients, size)


def draw_cohort(federation: "Federation", this_round: Round, state: State, shares: Shares = NO_SHARES) -> list[Client]:
    """Return the clients of a round with their shares of their budgets, and their classes if the policy needs them."""
    clients = federation.clients
    ids = _draw_ids(federation, this_round, state)
    sizes, numbers = [clients.size(i) for i in ids], [clients.number_of(i) for i in ids]
    cohort = cohort_of(ids, sizes, federation.resolved_budgets, federation.by, numbers)
    if shares:
        cohort = [replace(one, budget=one.budget.scaled(shares.get(one.id, 1.0))) for one in cohort]
    if federation.assign:
        cohort = _exchange_patterns(federation, cohort)
    if needs_classes(federation):
        cohort = [replace(client, classes=clients.classes_of(client.id)) for client in cohort]
    return cohort


def draw_budgets(federation: "Federation", this_round: Round) -> list[Budget]:
    """Return the budgets of a round's cohort; all budgets if the cohort depends on the state before the round."""
    if federation.sampling.reads_state:
        return list(federation.resolved_budgets)
    ids = _draw_ids(federation, this_round, State(this_round.index - 1, {}))
    return [client.budget for client in cohort_of(ids, [1] * len(ids), federation.resolved_budgets, federation.by)]


def _draw_ids(federation: "Federation", this_round: Round, state: State) -> list[int]:
    clients, size = federation.clients, federation.cohort
    ids = federation.sampling.draw(this_round, clients, size, state)
    return checked_ids(federation.sampling, ids, this_round, len(clients), size)


def needs_classes(federation: "Federation") -> bool:
    """Return whether the policy asks for the clients' classes, and the model has one output row for each class."""
    decision = federation.task.decision
    has_rows = decision is not None and decision.threshold is None
    return federation.policy.traits().wants_classes and has_rows and federation.clients.examples.classes > 0


def resolve_budgets(budgets: Budgets | None, codebook: Codebook, cohort: int, clients: int) -> tuple[Budget, ...]:
    """Return the budgets of the slots or clients, whole models by default.

    Args:
        budgets: The budgets as the user gave them.
        codebook: What the digits of a code mean.
        cohort: Number of clients in a round.
        clients: Number of clients in the population.

    Raises:
        InputError: If the number of budgets does not fit.
    """
    if budgets is None:
        return (Budget(),) * cohort
    resolved = budgets.resolve(codebook)
    if budgets.by == "slot" and len(resolved) != cohort:
        raise InputError(
            f"the code has {len(resolved)} slots but cohort is {cohort}; make them equal, or use by_client"
        )
    if len(resolved) > clients:
        raise InputError(f"there are {len(resolved)} budgets for {clients} clients; give at most one each")
    return resolved


def _exchange_patterns(federation: "Federation", cohort: list[Client]) -> list[Client]:
    """Return the cohort with patterns of equal size exchanged such that labels of holders complement each other."""
    mixes = torch.stack([federation.clients.label_mix(client.id) for client in cohort])
    order = assign_patterns([client.budget for client in cohort], mixes, federation.label_mix)
    return [replace(client, budget=cohort[place].budget) for client, place in zip(cohort, order, strict=True)]
