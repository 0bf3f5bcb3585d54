"""The cohort of a round: which clients are drawn, and what each can afford."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fedcover.aggregation.label_weights import assign_patterns
from fedcover.budgets import Budget, Budgets, Codebook
from fedcover.clients import Client, cohort_of, sample_ids
from fedcover.errors import InputError
from fedcover.seeding import Round

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


def draw_cohort(federation: "Federation", this_round: Round) -> list[Client]:
    """Return the clients of a round with their budgets, and their classes if the policy needs them."""
    clients = federation.clients
    ids = sample_ids(len(clients), federation.cohort, this_round)
    sizes, numbers = [clients.size(i) for i in ids], [clients.number_of(i) for i in ids]
    cohort = cohort_of(ids, sizes, federation.resolved_budgets, federation.by, numbers)
    if federation.assign:
        cohort = _exchange_patterns(federation, cohort)
    if federation.policy.traits().wants_classes:
        cohort = [replace(client, classes=clients.classes_of(client.id)) for client in cohort]
    return cohort


def draw_budgets(federation: "Federation", this_round: Round) -> list[Budget]:
    """Return the budgets of a round's cohort."""
    ids = sample_ids(len(federation.clients), federation.cohort, this_round)
    return [client.budget for client in cohort_of(ids, [1] * len(ids), federation.resolved_budgets, federation.by)]


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
