"""What a pruning policy is: theta and a cohort in, one mask for each client out."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedcover.budgets import QUARTERS, Budget, Codebook
from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.params import Mask, Params
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.training.options import TrainingOptions

State = dict[str, Tensor]
"""What a policy carries from round to round; it goes into checkpoints."""

SHOWN = "shown/"
"""Under ``shown/NAME`` a state has the mask of the global model, where a policy has one mask for all."""


def shown_in(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mask under which the global model is evaluated and loaded; empty, for all of it, if a state has none."""
    return {name.removeprefix(SHOWN): kept for name, kept in state.items() if name.startswith(SHOWN)}


@dataclass(frozen=True)
class RoundFeedback:
    """What a round's clients sent back, apart from the values that were averaged."""

    clients: int
    """How many answered with finite values."""
    counts: Mapping[str, Tensor]
    """For every entry how many of their masks hold it; clients that regrow send masks of their own."""
    report: Params | None = None
    """The mean of their reports, in double precision, over those that were asked for one."""


def check_bound(found: Collection[object], name: object) -> None:
    """Nothing, or an error if a policy has not found the layers or units that ``bind`` gives it."""
    if not found:
        raise InputError(f"{name} is not bound to a network; call policy.bind(trace(model, example)) first")


class Policy(ABC):
    """The paper's P: m_{q,n} = P(theta_q, n), planned jointly for a round's cohort.

    A policy hides nothing: what it must remember goes through ``plan`` as state. Equal masks should
    be the same object, which spares work later. Randomness comes from ``this_round`` alone.
    """

    def __repr__(self) -> str:
        return type(self).__name__

    codebook: Codebook = QUARTERS
    """What the digits of a code mean to this policy."""
    units: bool = False
    """Whether it prunes whole units rather than single weights; decides what budgets in parameters or bytes buy."""
    any_device: bool = False
    """Whether ``plan`` works on whatever device theta is on; if not, it is given theta on the CPU."""
    reads_theta: bool = True
    """Whether masks depend on theta: an audit without training then speaks of the initial theta alone."""
    moves: bool = True
    """Whether masks may change from round to round while theta and the cohort stay the same."""
    wants_classes: bool = False
    """Whether ``plan`` asks for the classes that each client has examples of."""
    ignores_budgets: bool = False
    """Whether every client holds the whole model, whatever its budget."""
    follows_patterns: bool = True
    """Whether the bands of a budget decide which items a client holds, and not only how many."""
    designs_coverage: bool = False
    """Whether masks cover every entry as soon as the budgets of a cohort add up to one model."""
    dense_in_turn: bool = False
    """Whether clients hold some tensors whole in turn, whatever their budgets, as grow-and-prune does."""

    one_by_one: bool = False
    """Whether its drills need an engine that trains clients one by one, as serial and processes do."""

    def server_step(self, this_round: Round) -> float:
        """eta of theta' = theta + eta (average - theta); 1 takes the average as it is."""
        return 1.0

    def bind(self, structure: ModelStructure) -> "Policy":
        """This policy, ready for one network."""
        return self

    def check_budgets(self, theta: Params, budgets: Sequence[Budget]) -> None:
        """Raise InputError if what the policy was asked for is out of reach of cohorts with these budgets."""
        return

    def item_ranks(self, theta: Params) -> Mapping[str, Tensor] | None:
        """Return the rank of every item by layer, if budgets choose items by rank; None otherwise."""
        return None

    def start(self) -> State:
        """The state before the first round."""
        return {}

    @abstractmethod
    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """One mask for each client of the cohort, and the state for the next round."""

    def training_options(
        self, theta: Params, cohort: Sequence[Client], masks: Sequence[Mask], this_round: Round, state: State
    ) -> Sequence[TrainingOptions | None]:
        """How each client trains beyond plain masked SGD; ``masks`` and ``state`` are what ``plan`` returned."""
        return [None] * len(cohort)

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: Round, state: State) -> State:
        """The state for the next round, once ``theta`` is averaged; ``state`` is what ``plan`` returned."""
        return state


class PerClient(Policy):
    """A policy that asks a function for each client's mask."""

    def __init__(self, function: Callable[[Params, Client, Round], Mask]) -> None:
        self._function = function
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", "policy")

    def __repr__(self) -> str:
        return self.__name__

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """One call of the function for each client."""
        return [self._function(theta, client, this_round) for client in cohort], state


def policy(function: Callable[[Params, Client, Round], Mask]) -> PerClient:
    """A policy made from a function (theta, client, this_round) -> mask; use it as a decorator.

    >>> import torch
    >>> @policy
    ... def random_weights(theta, client, this_round):
    ...     rng = this_round.generator("mask", client.id)
    ...     return {k: torch.rand(t.shape, generator=rng) < client.budget.keep for k, t in theta.items() if t.ndim > 1}
    >>> random_weights
    random_weights
    """
    return PerClient(function)
