"""``only`` and ``skip``: any policy, restricted to some layers of the model."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

from torch import Tensor

from fedcover.aggregation.base import Aggregator
from fedcover.budgets import Budget, Codebook
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.masks.part_sizes import PartSizes
from fedcover.params import FULL, Params
from fedcover.policies.base import ClientPlan, Policy, RoundFeedback, State, Traits
from fedcover.seeding import Round
from fedcover.structure.selection import select_layers
from fedcover.structure.trace import ModelStructure

Factory = TypeVar("Factory", bound=Callable[..., Any])
ARGUMENTS = """\
    only: Layers that may be pruned, by names or patterns such as "encoder.*"; all, if it is left out.
    skip: Layers that stay whole, in the same form."""


@dataclass(frozen=True)
class Selected(Policy):
    """A policy that prunes only some layers; its budgets count the items of these layers.

    A policy of whole units prunes a group of units if all layers whose outputs these are may be pruned. A layer that
    stays whole keeps all its outputs; it still loses the inputs that come from removed units of other layers.
    """

    inner: Policy
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    whole: frozenset[str] = field(default=frozenset(), repr=False)
    """Parameters that are never pruned, once the policy is bound."""

    def __post_init__(self) -> None:
        traits = self.inner.traits()
        if traits.ignores_budgets and not traits.needs_complement:
            raise InputError(f"{self.inner} prunes nothing, so only and skip have no effect; leave them out")

    def __repr__(self) -> str:
        chosen = [f"{name}={list(value)}" for name, value in (("only", self.only), ("skip", self.skip)) if value]
        return f"{self.inner!r} with {' and '.join(chosen)}"

    @property
    def name(self) -> str:
        """The name of the inner policy."""
        return str(getattr(self.inner, "name", None) or str(self.inner).partition("(")[0])

    @property
    def codebook(self) -> Codebook:  # type: ignore[override]
        """The codebook of the inner policy."""
        return self.inner.codebook

    def traits(self) -> Traits:
        """Return the traits of the inner policy."""
        return self.inner.traits()

    def prunable(self, structure: ModelStructure) -> ModelStructure:
        """Return the structure in which only the selected layers may be pruned."""
        return select_layers(self.inner.prunable(structure), self.only, self.skip)

    def bind(self, structure: ModelStructure) -> "Selected":
        """Return this policy bound to the selected layers of one model."""
        selected = self.prunable(structure)
        whole = frozenset(name for name in structure.shapes if not selected.selects(name))
        return replace(self, inner=self.inner.bind(selected), whole=whole)

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most, as the inner policy does."""
        return self.inner.part_sizes(structure)

    def server_step(self, this_round: Round) -> float:
        """Return the step of the inner policy."""
        return self.inner.server_step(this_round)

    def aggregate(self, aggregator: Aggregator) -> Aggregator:
        """Return the aggregator of the inner policy."""
        return self.inner.aggregate(aggregator)

    def check_budgets(self, theta: Params, budgets: Sequence[Budget]) -> None:
        """Check the budgets as the inner policy does."""
        self.inner.check_budgets(theta, budgets)

    def item_ranks(self, theta: Params) -> Mapping[str, Tensor] | None:
        """Return the ranks of the inner policy."""
        return self.inner.item_ranks(theta)

    def start(self) -> State:
        """Return the state of the inner policy before the first round."""
        return self.inner.start()

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the plans of the inner policy; of masks of single weights, the part for the selected layers."""
        plans, state = self.inner.plan(theta, cohort, this_round, state)
        if self.traits().units:
            return plans, state
        masks = {
            id(plan.mask): {name: kept for name, kept in plan.mask.items() if name not in self.whole} or FULL
            for plan in plans
        }
        return [replace(plan, mask=masks[id(plan.mask)]) for plan in plans], state

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: Round, state: State) -> State:
        """Return the state of the inner policy for the next round."""
        return self.inner.observe(theta, feedback, this_round, state)


def selected(policy: Policy, only: Sequence[str] | None = None, skip: Sequence[str] | None = None) -> Policy:
    """Return a policy that prunes only some layers of the model.

    The budgets count only these layers: with a keep of 0.5, each of them keeps half of its items, and all others stay
    whole, as the output layer always does.

    Args:
        policy: Any policy.
        only: Layers that may be pruned; all, if it is left out. Each is the name of a parameter, of a layer or of a
            module with several layers, or a pattern of such names, in which * stands for any text.
        skip: Layers that stay whole, in the same form.

    >>> from fedcover.policies.weight_pruning import weight_pruning
    >>> selected(weight_pruning(), skip=["classifier.*"])
    Ranked(name='WP') with skip=['classifier.*']
    """
    for setting, value in (("only", only), ("skip", skip)):
        if isinstance(value, str):
            raise InputError(f"{setting} must be a list of layers; write {setting}=['{value}']")
    return Selected(policy, tuple(only or ()), tuple(skip or ())) if only or skip else policy


def with_selection(factory: Factory) -> Factory:
    """Return a factory of policies that also takes ``only`` and ``skip``."""
    signature = _signature(factory)
    if {"only", "skip"} & signature.parameters.keys():
        return factory

    @wraps(factory)
    def build(
        *args: Any, only: Sequence[str] | None = None, skip: Sequence[str] | None = None, **settings: Any
    ) -> Policy:
        return selected(factory(*args, **settings), only, skip)

    kind, layers = inspect.Parameter.KEYWORD_ONLY, Sequence[str] | None
    added = [inspect.Parameter(name, kind, default=None, annotation=layers) for name in ("only", "skip")]
    parameters = list(signature.parameters.values())
    place = len(parameters) - (bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[place:place] = added
    build.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    build.__doc__ = _documented(inspect.getdoc(factory) or "")
    return cast(Factory, build)


def _signature(factory: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a factory, without the fields of a dataclass that are not shown."""
    try:
        signature = inspect.signature(factory, eval_str=True)
    except Exception:  # annotations in quotes may name what cannot be imported here
        signature = inspect.signature(factory)
    hidden = {field.name for field in fields(factory) if not field.repr} if is_dataclass(factory) else set()
    return signature.replace(parameters=[one for name, one in signature.parameters.items() if name not in hidden])


def _documented(text: str) -> str:
    """Return a factory's docstring with ``only`` and ``skip`` at the end of its arguments."""
    summary, title, rest = text.partition("\n\nArgs:\n")
    arguments, gap, more = rest.partition("\n\n")
    return f"{summary}\n\nArgs:\n{arguments}{chr(10) * bool(title)}{ARGUMENTS}{gap}{more}"
