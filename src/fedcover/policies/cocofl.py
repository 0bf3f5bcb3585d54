"""CoCoFL: each client trains random consecutive layers and sees the others.

Pfeiffer, Rapp, Khalili and Henkel, "CoCoFL: Communication- and computation-aware federated learning via partial NN
freezing and quantization", TMLR 2023; code k1l1/CoCoFL. A budget there is measured time, data and memory, and here a
share of the parameters. Devices there compute the other layers in 8 bits; ``complement=Quantized(8)`` sends them so.
The server there moves a layer by its holders' share of the way to their mean, which is a damping of 1, the default.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Self

import torch

from fedcover.budgets import share
from fedcover.clients import Client
from fedcover.masks.part_sizes import PartSizes, PooledSizes
from fedcover.params import FULL, Mask, Params, device_of
from fedcover.policies.base import ClientPlan, Policy, State, Traits, check_bound
from fedcover.policies.registry import register
from fedcover.policies.unit_policy import width_of
from fedcover.seeding import Round
from fedcover.structure.depth import TrainedLayer, layers_of
from fedcover.structure.trace import ModelStructure


@dataclass(frozen=True)
class CoCoFL(Policy):
    """A random one of the longest runs of layers that fit the budget, in every round; at least the smallest layer."""

    layers: tuple[TrainedLayer, ...] = field(default=(), repr=False)
    sizes: tuple[int, ...] = field(default=(), repr=False)

    def traits(self) -> Traits:
        """Declare that only the size of a budget counts, and that masks leave out whole layers."""
        return Traits(any_device=True, reads_theta=False, follows_patterns=False, needs_complement=True)

    def bind(self, structure: ModelStructure) -> Self:
        """Return this policy with the model's layers in forward order."""
        layers = layers_of(structure, self)
        sizes = tuple(sum(torch.Size(structure.shapes[name]).numel() for name in layer.tensors) for layer in layers)
        return replace(self, layers=layers, sizes=sizes)

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: whole parameters, at least those of the smallest layer."""
        names = [name for layer in self.layers for name in layer.tensors]
        return PooledSizes(structure, names, cut=0, least=min(self.sizes))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return masks of whole layers, drawn by a generator of each client's own."""
        check_bound(self.layers, self)
        return [ClientPlan(client, self._mask(theta, client, this_round)) for client in cohort], state

    def runs(self, keep: float) -> list[range]:
        """Return the longest runs of layers with at most a share ``keep`` of the parameters of all layers."""
        bounds = [0, *accumulate(self.sizes)]
        ends = [bisect_right(bounds, start + share(keep, bounds[-1])) - 1 for start in bounds[:-1]]
        longest = [range(start, end) for start, end in enumerate(ends) if end > max(start, *ends[:start], 0)]
        return longest or [range(smallest := self.sizes.index(min(self.sizes)), smallest + 1)]

    def _mask(self, theta: Params, client: Client, this_round: Round) -> Mask:
        runs = self.runs(width_of(client.budget, self))
        drawn = torch.randint(len(runs), (), generator=this_round.generator("layers of CoCoFL", client.id))
        if len(run := runs[int(drawn)]) == len(self.layers):
            return FULL
        kept = {name: number in run for number, layer in enumerate(self.layers) for name in layer.tensors}
        return {n: torch.full(theta[n].shape, k, dtype=torch.bool, device=device_of(theta)) for n, k in kept.items()}


@register("CoCoFL")
def cocofl() -> CoCoFL:
    """CoCoFL: each client trains random consecutive layers within its budget, and sees the others."""
    return CoCoFL()
