"""The interface of pruning policies: theta and a cohort in, one plan per client that trains out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fedcover.aggregation.base import Aggregator
from fedcover.budgets import QUARTERS, Budget, Codebook
from fedcover.clients import Client
from fedcover.errors import InputError, check_arguments
from fedcover.masks.part_sizes import PartSizes, sizes_of_units, sizes_of_weights
from fedcover.params import FULL, Mask, Params
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.training.options import TrainingOptions

State = dict[str, Tensor]
"""Tensors that a policy carries from round to round; checkpoints store them."""

HeldUnits = tuple[Tensor | None, ...]
"""For each group a bool tensor of the units that a client holds; None for all of them."""

UnitChooser = Callable[[Sequence[Client], Round, State], tuple[list[HeldUnits], State]]
"""A function (cohort, this_round, state) that returns the units of each client, and the state for the next round."""

SHOWN = "shown/"
"""Prefix of the state's entries that hold the mask of the global model, for policies with one mask for all."""


def shown_in(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mask under which the global model is evaluated and loaded; empty if the whole model is."""
    return {name.removeprefix(SHOWN): kept for name, kept in state.items() if name.startswith(SHOWN)}


@dataclass(frozen=True)
class RoundFeedback:
    """What a policy learns of a round's updates, apart from the averaged values."""

    clients: int
    """Number of clients whose updates were accepted."""
    counts: Mapping[str, Tensor]
    """For every entry the number of their masks that hold it. Clients that regrow their mask send the new one."""
    report: Params | None = None
    """The mean of their gradient reports, in double precision; None if no client was asked for one."""


@dataclass(frozen=True, eq=False)
class ClientPlan:
    """What one client of a cohort does in a round: the mask that it trains under, and how it trains.

    Clients with equal plans should share the mask and the options, which saves work later.
    """

    client: Client
    mask: Mask = field(default_factory=lambda: FULL)
    options: TrainingOptions | None = None
    """What its training adds to plain masked SGD; None for nothing."""


def plans_of(cohort: Sequence[Client], masks: Sequence[Mask]) -> list[ClientPlan]:
    """Return the plans of a cohort in which every client trains, each under its mask, without training options.

    >>> from fedcover.budgets import Budget
    >>> [plan.mask is FULL for plan in plans_of([Client(0, 0, Budget())], [FULL])]
    [True]
    """
    return [ClientPlan(client, mask) for client, mask in zip(cohort, masks, strict=True)]


@dataclass(frozen=True)
class Traits:
    """What code outside a policy must know about it; the defaults are valid for any policy that keeps its budgets."""

    units: bool = False
    """Whether it prunes whole units rather than single weights; budgets in parameters or bytes depend on it."""
    any_device: bool = False
    """Whether ``plan`` works on the device of theta; otherwise theta is moved to the CPU first."""
    reads_theta: bool = True
    """Whether masks depend on theta; an audit without training then holds only for the initial theta."""
    moves: bool = True
    """Whether masks may change from round to round while theta and the cohort stay the same."""
    wants_classes: bool = False
    """Whether ``plan`` needs the classes of which each client has examples."""
    ignores_budgets: bool = False
    """Whether budgets have no effect: every client holds the whole model, or the same part of it as all others."""
    follows_patterns: bool = True
    """Whether the bands of a budget decide which items a client holds, and not only how many."""
    designs_coverage: bool = False
    """Whether masks cover every entry as soon as the budgets of a cohort add up to one model."""
    dense_in_turn: bool = False
    """Whether clients hold some tensors whole in turn, whatever their budgets, as in grow-and-prune."""
    prunes_global_model: bool = False
    """Whether the global model is pruned too, by a mask that all clients share."""
    needs_complement: bool = False
    """Whether clients must see the values outside their masks, as with fedcover.Frozen(): masks may leave out whole
    layers."""
    needs_zeros: str = ""
    """What of it needs zeros outside masks, such as "its scaler"; empty if clients may see values there."""
    limits_memory: bool = False
    """Whether budgets limit the memory of a training step, and not what a client holds."""
    needs_exits: bool = False
    """Whether the model must have exits: clients hold the layers up to one of them."""
    prediction: str = "mean"
    """How a model with exits predicts: by the ``mean`` of the scores of its exits, or by the ``last`` one."""
    reports: bool = False
    """Whether clients report gradients of the whole model in some rounds."""
    regrows: bool = False
    """Whether clients return a new mask in some rounds."""
    one_by_one: bool = False
    """Whether its training options need an engine that trains clients one by one, such as serial or processes."""
    hold: UnitChooser | None = None
    """The method that chooses the units of each client, if these units decide the masks: audits then count units.

    Output rows may also depend on a client's classes. None if masks depend on anything else, or clients sit out."""


def check_bound(layers: Collection[object], name: object) -> None:
    """Raise InputError if a policy is not bound to a model, that is, has no layers or units yet."""
    if not layers:
        raise InputError(f"{name} is not bound to a model; call policy.bind(trace(model, example)) first")


class Policy(ABC):
    """The paper's P: m_{q,n} = P(theta_q, n), planned jointly for a round's cohort.

    A policy has no hidden state: what it must remember goes through ``plan`` as ``state``. All randomness comes from
    ``this_round.generator``. Subclasses implement ``plan``, override ``traits`` to declare what other code must know
    about them, and override other hooks where they need them; ``check_policy`` tests that a policy keeps the contract.
    """

    def __repr__(self) -> str:
        return type(self).__name__

    codebook: Codebook = QUARTERS
    """What the digits of a code mean to this policy."""

    def traits(self) -> Traits:
        """Return what code outside the policy must know about it."""
        return Traits()

    def server_step(self, this_round: Round) -> float:
        """Return eta of theta' = theta + eta (average - theta); with 1, theta' is the average."""
        return 1.0

    def aggregate(self, aggregator: Aggregator) -> Aggregator:
        """Return the aggregator of the clients' updates: the federation's, or one around it; the policy is bound."""
        return aggregator

    def prunable(self, structure: ModelStructure) -> ModelStructure:
        """Return the structure in which only layers that this policy may prune are selected."""
        return structure

    def bind(self, structure: ModelStructure) -> "Policy":
        """Return this policy bound to one model."""
        return self

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most, for budgets in other units than fractions.

        Args:
            structure: The structure that ``prunable`` returned; the policy is bound to it.

        Raises:
            InputError: If clients may hold more than their budgets.
        """
        return sizes_of_units(structure) if self.traits().units else sizes_of_weights(structure)

    def check_budgets(self, theta: Params, budgets: Sequence[Budget]) -> None:
        """Raise InputError if what the policy was asked for is out of reach of cohorts with these budgets."""
        return

    def item_ranks(self, theta: Params) -> Mapping[str, Tensor] | None:
        """Return the rank of every item by layer, if budgets choose items by rank; None otherwise."""
        return None

    def start(self) -> State:
        """Return the state before the first round."""
        return {}

    @abstractmethod
    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return one plan for each client that trains, and the state for the next round.

        The plans follow the order of the cohort. A client without a plan sits the round out; at least one must train.

        Args:
            theta: The global parameters by name; must not be changed.
            cohort: The clients of the round with their budgets.
            this_round: The round's index, and its generators for random draws.
            state: The state of the previous round; must not be changed.
        """

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: Round, state: State) -> State:
        """Return the state for the next round; ``theta`` is the new average, ``state`` what ``plan`` returned."""
        return state


class PerClient(Policy):
    """A policy that calls a function for each client's mask."""

    def __init__(self, function: Callable[[Params, Client, Round], Mask]) -> None:
        check_arguments(function, ("theta", "client", "this_round"), "a policy's function")
        self._function = function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "policy")

    def __repr__(self) -> str:
        return self.__name__

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return a plan with the function's mask for each client, and the state unchanged."""
        return [ClientPlan(client, self._function(theta, client, this_round)) for client in cohort], state


def is_built_in(policy: Policy) -> bool:
    """Return whether a policy is one of this package, and not written by a user."""
    return type(policy).__module__.partition(".")[0] == "fedcover" and not isinstance(policy, PerClient)


def policy(function: Callable[[Params, Client, Round], Mask]) -> PerClient:
    """Make a policy of a function (theta, client, this_round) -> mask; use it as a decorator.

    Args:
        function: Maps the global parameters, a client with its budget and a round to the client's mask, a dict of
            bool tensors; a parameter that is left out is kept whole.

    >>> import torch
    >>> @policy
    ... def random_weights(theta, client, this_round):
    ...     rng = this_round.generator("mask", client.id)
    ...     return {k: torch.rand(t.shape, generator=rng) < client.budget.keep for k, t in theta.items() if t.ndim > 1}
    >>> random_weights
    random_weights
    """
    return PerClient(function)
