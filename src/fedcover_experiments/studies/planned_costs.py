"""What a client's training costs in the study of costs, from masks that are planned without training."""

from dataclasses import dataclass
from functools import cache
from statistics import fmean

import torch

from fedcover.budgets import budgets_of
from fedcover.clients import cohort_of
from fedcover.masks.training_cost import TrainingCosts
from fedcover.models import INPUT_SHAPES, build
from fedcover.params import Mask, params_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.recipes import LocalSGD
from fedcover_experiments.runner import COHORT, Experiment
from fedcover_experiments.studies.costs import MODEL, ZERO, parts_of, policy_of

ROUNDS, CLASSES = 15, 10
"""The rounds that are planned: a cycle of FedPart on LeNet, with its rounds of full training."""


@dataclass(frozen=True)
class PlannedCost:
    """The training cost of a client, as shares of a full client's."""

    compute: float
    """FLOPs on dense kernels, mean over clients and rounds."""
    memory: float
    """The largest memory of any client in any round: a device must have it."""


class Planner:
    """Plans the rounds of experiments on the study's network, and returns their costs."""

    def __init__(self) -> None:
        self._structure = _structure()
        recipe = LocalSGD()
        self._costs = TrainingCosts(self._structure, recipe.batch_size, len(recipe.moments))
        self._full = self._costs.of({})
        self._masks: dict[tuple[str, str], list[Mask]] = {}
        self._shares: dict[tuple[str, str], PlannedCost] = {}

    def cost_of(self, experiment: Experiment) -> PlannedCost:
        """Return the cost of an experiment's clients, which is computed once for all splits."""
        key = experiment.policy, experiment.code
        if key not in self._shares:
            self._shares[key] = self._cost_of(experiment)
        return self._shares[key]

    def _cost_of(self, experiment: Experiment) -> PlannedCost:
        masks, complement = parts_of(experiment)
        costs = [self._costs.of(mask, sees=complement != ZERO) for mask in self._planned(masks, experiment.code)]
        return PlannedCost(
            fmean(cost.flops_per_example for cost in costs) / self._full.flops_per_example,
            max(cost.memory for cost in costs) / self._full.memory,
        )

    def _planned(self, masks: str, code: str) -> list[Mask]:
        """Return the masks of all clients in the planned rounds, without repeats."""
        if (masks, code) not in self._masks:
            policy = policy_of(masks).bind(self._structure)
            parsed = budgets_of(code, policy.codebook)
            cohort = cohort_of(range(COHORT), [1] * COHORT, parsed, "slot")
            theta, state, planned = params_of(self._structure.model), policy.start(), []
            for index in range(1, (ROUNDS if policy.traits().moves else 1) + 1):
                plans, state = policy.plan(theta, cohort, Round(index, 0), state)
                planned += [plan.mask for plan in plans]
            self._masks[masks, code] = planned
        return self._masks[masks, code]


@cache
def planned_cost(experiment: Experiment) -> PlannedCost:
    """Return the cost of an experiment's clients; masks are planned once."""
    return _planner().cost_of(experiment)


@cache
def _planner() -> Planner:
    return Planner()


def _structure() -> ModelStructure:
    shape = INPUT_SHAPES[MODEL]
    return trace(build(MODEL, shape, CLASSES, 0), torch.zeros(2, *shape))
