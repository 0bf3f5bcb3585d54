"""Checks of the kinds of a federation's arguments, so that a wrong one is named with what to give instead."""

from typing import TYPE_CHECKING

from fedcover.aggregation.base import Aggregator
from fedcover.budgets import Budgets
from fedcover.data import Population
from fedcover.engines.base import Engine
from fedcover.errors import InputError, check_bool, shown
from fedcover.federation.sampling import Sampling
from fedcover.policies.base import Policy
from fedcover.training.recipes import Recipe
from fedcover.training.task import Task

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "task": (Task, "a task: fedcover.Task(model)"),
    "clients": (Population, "clients with their examples, such as fedcover.data.iid(examples, clients=10)"),
    "policy": (Policy, "a policy, such as fedcover.weight_pruning()"),
    "budgets": ((Budgets, type(None)), "budgets, such as fedcover.by_slot('1247')"),
    "local": (Recipe, "a recipe, such as fedcover.LocalSGD() or fedcover.LocalAdam()"),
    "aggregator": (Aggregator, "an aggregator, such as fedcover.mean(), or a function with @fedcover.aggregator"),
    "sampling": (
        Sampling,
        "client sampling, such as fedcover.weighted('examples'), or a function with @fedcover.sampling",
    ),
    "engine": (Engine, "an engine, such as fedcover.Serial()"),
}
"""The type of each argument, and what to give in words."""
SWITCHES = ("certify", "require_coverage", "assign")


def check_arguments(federation: "Federation") -> None:
    """Raise InputError unless each argument of a federation is of its kind."""
    for name, (kind, must) in KINDS.items():
        value = getattr(federation, name)
        if not isinstance(value, kind):
            raise InputError(f"{name} must be {must}; got {shown(value)}")
    for name in SWITCHES:
        check_bool(name, getattr(federation, name))
