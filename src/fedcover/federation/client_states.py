"""What the server keeps for each client from round to round: control variate, moments, its copy of the model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.federation.checkpoint import State
from fedcover.federation.complements import CopyUpdates
from fedcover.federation.control_variates import ControlUpdates, corrected, uses_control_variates
from fedcover.federation.kept_moments import MomentUpdates, with_moments
from fedcover.federation.planned_round import PlannedRound
from fedcover.policies.base import ClientPlan

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation


class ClientStates(Protocol):
    """The states of clients after a round, from its updates as they arrive."""

    def add(self, update: ClientUpdate) -> None:
        """Add one client's update."""

    def state(self) -> dict[str, Tensor]:
        """Return ``State.clients`` for the next round."""


class SeveralStates:
    """Several kinds of states, or none, each with its own keys."""

    def __init__(self, planned: PlannedRound, states: Sequence[ClientStates]) -> None:
        self._before, self._states = planned.state.clients, states

    def add(self, update: ClientUpdate) -> None:
        """Add one client's update to each kind."""
        for states in self._states:
            states.add(update)

    def state(self) -> dict[str, Tensor]:
        """Return the states of the last round, with what has changed."""
        after = self._before
        for states in self._states:
            after = after | {k: t for k, t in states.state().items() if self._before.get(k) is not t}
        return after


def with_client_states(federation: "Federation", state: State, plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return the plans, with what is kept of their clients."""
    if uses_control_variates(federation.local):
        return corrected(federation, state, plans)
    return with_moments(federation.local, state, plans) if federation.local.keep_moments else list(plans)


def client_states(federation: "Federation", planned: PlannedRound) -> ClientStates:
    """Return the states of clients after a planned round, to which its updates are added."""
    states: list[ClientStates] = [CopyUpdates(federation, planned)] if federation.complement.keeps_copies else []
    if uses_control_variates(federation.local):
        states.append(ControlUpdates(federation, planned))
    elif federation.local.keep_moments:
        states.append(MomentUpdates(planned))
    return SeveralStates(planned, states)
