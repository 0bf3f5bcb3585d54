"""The budgets of a method's clients: at each level the largest sub-model that costs at most as much as the width."""

from collections.abc import Callable
from functools import cache

import torch

from fedcover.budgets import Budget
from fedcover.calibration.cost_model import CostModel
from fedcover.calibration.policy_costs import cost_model_of
from fedcover.clients import Client
from fedcover.data import shape_of
from fedcover.errors import InputError
from fedcover.masks.training_cost import TrainingCosts
from fedcover.models import build
from fedcover.params import params_of
from fedcover.policies.base import Policy
from fedcover.policies.fixed_subnetwork import fixed_subnetwork
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, trace
from fedcover.training.complements import Frozen, Zero
from fedcover.training.recipes import LocalSGD
from fedcover_experiments.referee.methods import FULL, SMALLEST, Method
from fedcover_experiments.referee.settings import Problem, Setting

UNITS = {"parameters": "parameters", "compute": "macs", "bandwidth": "bytes"}
"""The unit of each constraint whose costs follow from sizes; memory is measured on masks."""
BISECTIONS, LEAST = 8, 1e-3
"""Steps of the search for a keep by memory, and the least keep that it tries."""


@cache
def structure_of(problem: Problem, network: str = "") -> ModelStructure:
    """Return the structure of a problem's network, or of another one on its data."""
    shape, classes = shape_of(problem.data)
    example = torch.zeros(2, *shape, dtype=torch.long if len(shape) == 1 else torch.float32)
    return trace(build(network or problem.network, shape, classes, 0), example)


def keeps_of(method: Method, setting: Setting) -> dict[float, float]:
    """Return the keep of each level by its width.

    >>> from fedcover_experiments.referee.methods import METHODS
    >>> from fedcover_experiments.referee.settings import SETTINGS
    >>> setting = SETTINGS["mnist_writers-cnn/natural/25-25-25-25"]
    >>> keeps_of(METHODS["FedRolex"], setting)[0.5], round(keeps_of(METHODS["WP"], setting)[0.5], 3)
    (0.5, 0.248)
    """
    if method.name == FULL:
        return dict.fromkeys(setting.widths, 1.0)
    if method.name == SMALLEST:
        return dict.fromkeys(setting.widths, min(setting.widths))
    return {width: _level(method, setting, width)[0] for width in setting.widths}


def within_budget(method: Method, setting: Setting) -> bool:
    """Return whether no client of a method costs more than its level; who sees the whole model also holds it."""
    if method.name in (FULL, SMALLEST):
        return method.name == SMALLEST
    sees = setting.constraint == "parameters" and method.build(setting.widths).traits().needs_complement
    return not sees and all(_level(method, setting, width)[1] for width in setting.widths)


@cache
def _level(method: Method, setting: Setting, width: float) -> tuple[float, bool]:
    """Return the largest keep that costs at most as much as a width, and True; the width's share if none does.

    Who can hold the whole network can hold one with exits too, which are a thousandth of its parameters.
    """
    problem, recipe = setting.problem, setting.training.recipe(1.0, 1)
    policy, reference = method.build(setting.widths), CostModel(structure_of(problem), units=True)
    share = reference.at(width).parameters / reference.at(1.0).parameters
    try:
        structure = structure_of(problem, method.network(problem.network))
        if method.exits and width == 1:
            return 1.0, True
        if setting.constraint == "memory":
            return _keep_by_memory(policy, structure, recipe, _width_memory(structure_of(problem), recipe, width)), True
        unit = UNITS[setting.constraint]
        complement = Frozen() if policy.traits().needs_complement else Zero()
        costs = cost_model_of(policy, structure, recipe, complement)
        return costs.keep_for(unit, getattr(reference.at(width), unit)), not policy.traits().ignores_budgets
    except InputError:
        return share, False


def _width_memory(structure: ModelStructure, recipe: LocalSGD, width: float) -> tuple[float, int]:
    """Return a width, and the memory of a training step of its sub-model."""
    costs = TrainingCosts(structure, recipe.batch_size, len(recipe.moments))
    return width, _memory_of(fixed_subnetwork(), structure, costs)(width)


def _keep_by_memory(
    policy: Policy, structure: ModelStructure, recipe: LocalSGD, reference: tuple[float, int]
) -> float:  # fmt: skip
    """Return the largest keep, about, whose training step needs at most the memory of a width's.

    Raises:
        InputError: If no keep does.
    """
    costs = TrainingCosts(structure, recipe.batch_size, len(recipe.moments))
    memory, (width, most) = _memory_of(policy, structure, costs), reference
    if policy.traits().limits_memory:
        return most / costs.of({}).memory
    if memory(width) <= most:
        return width  # a policy of whole units
    low, high = LEAST, 1.0
    if memory(low) > most:
        raise InputError(f"{policy} has no sub-model that is trained in {most} bytes")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if memory(middle) <= most else (low, middle)
    return low


def _memory_of(policy: Policy, structure: ModelStructure, costs: TrainingCosts) -> Callable[[float], int]:
    """Return the memory of a training step of one client as a function of its keep, in the first round."""
    bound, theta = policy.bind(structure), params_of(structure.model)

    def memory(keep: float) -> int:
        plans, _ = bound.plan(theta, [Client(0, 0, Budget(keep))], Round(1, 0), bound.start())
        return costs.of(plans[0].mask, sees=bound.traits().needs_complement).memory

    return memory
