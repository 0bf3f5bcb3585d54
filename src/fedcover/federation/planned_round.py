"""A planned round: its state, one plan and one job per client, and what can be measured before training."""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.federation.checkpoint import State
from fedcover.federation.extras import extras_of_plan
from fedcover.federation.layer_coverage import LayerCounts, layer_counts
from fedcover.masks.cost import Cost, costs_of, with_extras
from fedcover.masks.coverage import coverage_of
from fedcover.masks.noise import PruningNoise
from fedcover.params import Mask, Params, prune
from fedcover.policies.base import ClientPlan
from fedcover.seeding import Round
from fedcover.structure.trace import carries
from fedcover.training.client import Job
from fedcover.training.recipes import Recipe

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


class Clock:
    """A stopwatch for the stages of a round."""

    def __init__(self) -> None:
        self.seconds = {"plan": 0.0, "train": 0.0, "aggregate": 0.0, "evaluate": 0.0}
        self._last = time.perf_counter()

    def skip(self) -> None:
        """Drop the time since the last lap."""
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Add the time since the last lap to a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


@dataclass(frozen=True)
class PlannedRound:
    """A round that is planned, with one job per client."""

    this_round: Round
    state: State
    plans: list[ClientPlan]
    policy_state: dict[str, Tensor]
    """The policy's state after planning."""
    recipe: Recipe
    """The recipe of this round, whose step size is that of the schedule."""
    pruning: PruningNoise
    """||theta||^2, and the noise delta^2 of what each client sees."""
    jobs: list[Job]
    clock: Clock
    costs: list[Cost] = field(default_factory=list)
    """The cost of each client, which ``settle_round`` sets."""

    @property
    def errors(self) -> list[float]:
        """||theta - theta_n||^2 of each client, where theta_n is what it sees."""
        return [noise * self.pruning.norm2 for noise in self.pruning.each]

    @cached_property
    def cohort(self) -> list[Client]:
        """The clients that train."""
        return [plan.client for plan in self.plans]

    @cached_property
    def masks(self) -> list[Mask]:
        """The mask of each client."""
        return [plan.mask for plan in self.plans]

    @cached_property
    def recipes(self) -> dict[int, Recipe]:
        """The recipe of each client, by its id."""
        return {job.client.id: job.recipe for job in self.jobs}

    @cached_property
    def coverage(self) -> Mapping[str, Tensor]:
        """The coverage by the planned masks, computed on first access."""
        return coverage_of(self.masks, self.state.theta)

    @cached_property
    def planned_layers(self) -> LayerCounts:
        """The coverage of each tensor by the planned masks."""
        return layer_counts(self.coverage, {name for mask in self.masks for name in mask})

    def use_coverage(self, coverage: Mapping[str, Tensor], layers: LayerCounts) -> None:
        """Use a coverage that was computed with that of other runs."""
        vars(self).update(coverage=coverage, planned_layers=layers)

    def layer_counts(self, counts: Mapping[str, Tensor], pruned: Collection[str]) -> LayerCounts:
        """Return the coverage of each tensor, from that of its entries by masks that prune some tensors."""
        return self.planned_layers if counts is vars(self).get("coverage") else layer_counts(counts, pruned)


def job_of(federation: "Federation", plan: ClientPlan, theta: Params, recipe: Recipe, this_round: Round) -> Job:
    """Return the job of a planned client.

    Args:
        federation: The federation.
        plan: The client's plan.
        theta: The global parameters.
        recipe: The recipe of this round.
        this_round: The round.
    """
    own = recipe.of_client(plan.client.id)
    return Job(federation.task, federation.clients, plan.client, theta, plan.mask, own, this_round, plan.options)


def costs_of_plans(
    federation: "Federation", theta: Params, plans: Sequence[ClientPlan], this_round: Round
) -> list[Cost]:
    """Return the cost of each client; raise InputError if a mask keeps nothing, or nothing of a needed layer."""
    distinct = {id(plan.mask): plan for plan in plans}
    complement = federation.complement
    outside = complement.bytes_down if complement.sees else None
    costs = costs_of(federation.structure, [plan.mask for plan in distinct.values()], outside)
    cost_of_mask = dict(zip(distinct, costs, strict=True))
    for key, plan in distinct.items():
        whose = f"the mask of policy {federation.policy} for client {plan.client.number} in round {this_round.index}"
        if cost_of_mask[key].parameters == 0:
            raise InputError(f"{whose} keeps nothing; keep at least one entry")
        if complement.sees:  # nothing is missing where a mask is empty
            continue
        if (empty := cost_of_mask[key].emptied) and not carries(federation.structure, prune(theta, plan.mask)):
            raise InputError(
                f"{whose} keeps nothing of '{empty[0]}', so no input reaches the output; raise the budget"
                f" '{plan.client.budget}', or keep at least one entry of each layer in the policy"
            )
    local, full = federation.local, federation.full_cost
    extras = {id(plan.options): extras_of_plan(local, plan) for plan in plans}
    return [with_extras(cost_of_mask[id(plan.mask)], full, extras[id(plan.options)]) for plan in plans]


def costs_of_full_models(federation: "Federation", plans: Sequence[ClientPlan]) -> list[Cost]:
    """Return what each client would cost with the whole model, its moments and control variates among it.

    What a policy asks for, such as reports of gradients, is not needed then.
    """
    every = {id(plan.options): extras_of_plan(federation.local, plan) for plan in plans}
    full = federation.full_cost
    costs = {key: with_extras(full, full, replace(one, report=False, regrow=False)) for key, one in every.items()}
    return [costs[id(plan.options)] for plan in plans]


class RoundHook:
    """Changes to a round between its arrows, for studies of algorithms that depart from Algorithm 1.

    Subclass it and override what you need.
    """

    def begun(self, state: State) -> State:
        """Return the state from which the round is planned."""
        return state

    def planned(self, federation: "Federation", planned: PlannedRound) -> PlannedRound:
        """Return the planned round, whose jobs are trained and whose state the aggregation starts from."""
        return planned

    def updates(self, planned: PlannedRound, updates: Iterable[ClientUpdate]) -> Iterable[ClientUpdate]:
        """Return the updates that are aggregated, as a stream."""
        return updates
