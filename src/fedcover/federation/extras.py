"""What clients exchange beyond their values: moments, control variates, and what a policy asks for."""

from fedcover.federation.control_variates import uses_control_variates
from fedcover.masks.cost import Extras
from fedcover.policies.base import ClientPlan
from fedcover.training.options import PLAIN
from fedcover.training.recipes import Recipe


def extras_of_recipe(recipe: Recipe) -> Extras:
    """Return what a client exchanges under a recipe, from its second round on; the first has nothing to receive yet.

    >>> from fedcover.training.recipes import LocalAdam, LocalSGD
    >>> extras = extras_of_recipe(LocalAdam(keep_moments=True))
    >>> extras.received, extras.returned, extras_of_recipe(LocalSGD(control_variates=True)).received
    (3, 3, 1)
    """
    moments = len(recipe.moment_names) if recipe.keep_moments else 0
    return Extras(received=moments + uses_control_variates(recipe), returned=moments)


def extras_of_plan(recipe: Recipe, plan: ClientPlan) -> Extras:
    """Return what a planned client exchanges in its round."""
    options = plan.options or PLAIN
    received = bool(options.shifts) + len(options.moments)
    return Extras(options.report, options.regrow is not None, received, extras_of_recipe(recipe).returned)
