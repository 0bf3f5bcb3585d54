"""The costs of the parts that a policy gives to clients, which train by a recipe and see a complement."""

from dataclasses import replace

from fedcover.calibration.cost_model import CostModel
from fedcover.federation.extras import extras_of_recipe
from fedcover.policies.base import Policy
from fedcover.structure.trace import ModelStructure
from fedcover.training.complements import Complement
from fedcover.training.recipes import Recipe


def cost_model_of(policy: Policy, structure: ModelStructure, recipe: Recipe, complement: Complement) -> CostModel:
    """Return the costs of what clients hold, train and exchange in a round.

    Args:
        policy: The policy, which need not be bound.
        structure: The traced model.
        recipe: The clients' local training.
        complement: What clients see outside their masks.

    Raises:
        InputError: If clients may exceed their budgets.
    """
    bound, prunable = policy.bind(structure), policy.prunable(structure)
    traits = bound.traits()
    extras = replace(extras_of_recipe(recipe), report=traits.reports, regrow=traits.regrows)
    return CostModel(prunable, extras=extras, parts=bound.part_sizes(prunable), complement=complement)
