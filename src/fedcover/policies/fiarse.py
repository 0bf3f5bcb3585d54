"""FIARSE: the largest weights of the whole model, with gradients scaled by their distance to the threshold.

Wu, Wang, Wang, Hong, Su: "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction",
NeurIPS 2024. tau_n is the floor(c_n d)-th largest |theta| over all weights that may be pruned; client n holds those
that are not smaller, exactly floor(c_n d) of them (ties by index), and scales their gradients by
1 + 2 tau |theta| / (|theta| + tau)^2. A layer of which nothing would be left keeps its largest weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from fedcover.clients import Client
from fedcover.params import FULL, Mask, Params
from fedcover.policies.base import Policy, State, check_bound
from fedcover.policies.registry import register
from fedcover.policies.shared_mask import hidden_of, largest, magnitudes, whole_part
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure
from fedcover.training.options import TrainingOptions


@dataclass(frozen=True)
class Fiarse(Policy):
    """One threshold for all layers, by each client's keep; the bands of a budget have no effect."""

    any_device = True
    follows_patterns = False
    layers: tuple[str, ...] = field(default=(), repr=False)

    def bind(self, structure: ModelStructure) -> "Fiarse":
        """Return this policy with the model's hidden weight tensors."""
        return replace(self, layers=hidden_of(structure, "FIARSE"))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[Mask], State]:
        """Return the masks of the largest weights of all layers together."""
        check_bound(self.layers, "FIARSE")
        scores = magnitudes(theta, self.layers)
        size = sum(score.numel() for score in scores.values())
        keeps = {width_of(client.budget, self) for client in cohort}
        masks: dict[float, Mask] = {k: FULL if k == 1 else largest(scores, whole_part(k, size)) for k in keeps}
        return [masks[client.budget.keep] for client in cohort], state

    def training_options(
        self, theta: Params, cohort: Sequence[Client], masks: Sequence[Mask], this_round: Round, state: State
    ) -> list[TrainingOptions | None]:
        """Return the threshold of each client."""
        check_bound(self.layers, "FIARSE")
        sizes = torch.cat([score.flatten() for score in magnitudes(theta, self.layers).values()])
        falling = sizes.sort(descending=True).values
        options: dict[int, TrainingOptions] = {}
        for mask, client in zip(masks, cohort, strict=True):
            if id(mask) not in options:
                tau = float(falling[whole_part(client.budget.keep, len(falling)) - 1])
                options[id(mask)] = TrainingOptions(thresholds=dict.fromkeys(self.layers, tau))
        return [options[id(mask)] for mask in masks]


@register("FIARSE")
def fiarse() -> Fiarse:
    """FIARSE: the largest weights of all layers together; gradients scaled by their distance to the threshold."""
    return Fiarse()
