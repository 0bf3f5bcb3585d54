"""What the server keeps for each client from round to round: its control variate, or the moments of its optimizer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.federation.checkpoint import State
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


class UnchangedStates:
    """The states of clients whose training changes nothing that is kept."""

    def __init__(self, planned: PlannedRound) -> None:
        self._state = planned.state.clients

    def add(self, update: ClientUpdate) -> None:
        """Change nothing."""

    def state(self) -> dict[str, Tensor]:
        """Return the states of the last round."""
        return self._state


def with_client_states(federation: "Federation", state: State, plans: Sequence[ClientPlan]) -> list[ClientPlan]:
    """Return the plans, with what is kept of their clients."""
    if uses_control_variates(federation.local):
        return corrected(federation, state, plans)
    return with_moments(federation.local, state, plans) if federation.local.keep_moments else list(plans)


def client_states(federation: "Federation", planned: PlannedRound) -> ClientStates:
    """Return the states of clients after a planned round, to which its updates are added."""
    if uses_control_variates(federation.local):
        return ControlUpdates(federation, planned)
    return MomentUpdates(planned) if federation.local.keep_moments else UnchangedStates(planned)
