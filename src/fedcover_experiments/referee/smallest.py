"""The homogeneous smallest model: all clients train the same first units, and only these are evaluated."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fedcover.clients import Client
from fedcover.masks.part_sizes import PartSizes
from fedcover.params import Params
from fedcover.policies.base import SHOWN, ClientPlan, Policy, State, Traits
from fedcover.policies.fixed_subnetwork import fixed_subnetwork
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class SmallestModel(Policy):
    """The masks of FS, which also prune the global model; all clients must have one budget."""

    inner: Policy = field(default_factory=fixed_subnetwork)

    def traits(self) -> Traits:
        """Declare that the global model is pruned."""
        return replace(self.inner.traits(), prunes_global_model=True)

    def bind(self, structure: ModelStructure) -> "SmallestModel":
        """Return this policy with the units of a model."""
        return replace(self, inner=self.inner.bind(structure))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold."""
        return self.inner.part_sizes(structure)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the same mask for all clients, and the state with which the global model is evaluated under it."""
        plans, _ = self.inner.plan(theta, cohort, this_round, {})
        return plans, {SHOWN + name: kept for name, kept in plans[0].mask.items()}
