"""FedAvg: full models for all clients.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from fedcover.clients import Client
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.policies.base import ClientPlan, Policy, State, Traits
from fedcover.policies.registry import POLICIES
from fedcover.seeding import Round


@dataclass(frozen=True)
class FullModels(Policy):
    """Every client holds the whole model, whatever its budget."""

    def traits(self) -> Traits:
        """Declare that budgets have no effect."""
        return Traits(any_device=True, reads_theta=False, moves=False, ignores_budgets=True)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the full mask for every client."""
        return [ClientPlan(client) for client in cohort], state


@POLICIES.register("full", "FedAvg")
def full(*, only: Sequence[str] | None = None, skip: Sequence[str] | None = None) -> Policy:
    """Full models for all clients: FedAvg."""
    if only is not None or skip is not None:
        raise InputError("the policy full prunes nothing, so only and skip have no effect; leave them out")
    return FullModels()


# The documentation and the settings list no arguments.
full.__signature__ = inspect.Signature(return_annotation=Policy)  # type: ignore[attr-defined]
