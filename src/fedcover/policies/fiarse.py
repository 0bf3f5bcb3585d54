"""FIARSE: the largest weights of the whole model, with gradients scaled by their distance to the threshold.

Wu, Wang, Wang, Liu, Su and Gao, "FIARSE: Model-heterogeneous federated learning via importance-aware submodel
extraction", NeurIPS 2024; code HarliWu/FIARSE. tau_n is the floor(c_n d)-th largest |theta| over all weights that may
be pruned; client n holds those that are not smaller, exactly floor(c_n d) of them (ties by index), and scales their
gradients by 1 + 2 tau |theta| / (|theta| + tau)^2. A layer of which nothing would be left keeps its largest weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fedcover.clients import Client
from fedcover.masks.part_sizes import PartSizes, PooledSizes
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound
from fedcover.policies.registry import register
from fedcover.policies.shared_mask import largest, magnitudes, whole_part
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.training.options import TrainingOptions


@dataclass(frozen=True)
class Fiarse(Policy):
    """One threshold for all layers, by each client's keep; the bands of a budget have no effect."""

    layers: tuple[str, ...] = field(default=(), repr=False)

    def traits(self) -> Traits:
        """Declare that only the size of a budget counts."""
        return Traits(any_device=True, follows_patterns=False)

    def bind(self, structure: ModelStructure) -> "Fiarse":
        """Return this policy with the model's hidden weight tensors."""
        return replace(self, layers=hidden_weights(structure, "FIARSE"))

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: a share of all hidden weights together."""
        return PooledSizes(structure, self.layers)

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the masks of the largest weights of all layers together, and the threshold of each client."""
        check_bound(self.layers, "FIARSE")
        scores = magnitudes(theta, self.layers)
        falling = torch.cat([score.flatten() for score in scores.values()]).sort(descending=True).values
        parts: dict[float, tuple[Mask, TrainingOptions]] = {}
        for keep in {width_of(client.budget, self) for client in cohort}:
            count = whole_part(keep, len(falling))
            options = TrainingOptions(thresholds=dict.fromkeys(self.layers, float(falling[count - 1])))
            parts[keep] = FULL if keep == 1 else largest(scores, count), options
        return [ClientPlan(client, *parts[client.budget.keep]) for client in cohort], state


@register("FIARSE")
def fiarse() -> Fiarse:
    """FIARSE: the largest weights of all layers together; gradients scaled by their distance to the threshold."""
    return Fiarse()
