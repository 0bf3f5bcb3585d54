"""FedDST: one sparse mask for all clients that drops small weights and grows where gradients are large.

Bibikar, Vikalo, Wang, Chen: "Federated Dynamic Sparse Training: Computing Less, Communicating Less, Yet Learning
Better", AAAI 2022. The first mask is random, with the layer densities of Erdos-Renyi kernels. Every ``every`` rounds
clients drop a share of their smallest active weights during training and grow as many inactive ones by gradient
magnitude. The server averages each entry over its holders and keeps the largest entries that any client holds, in each
layer as many as before. The share falls as (1 + cos(pi q / until)) / 2, and readjustment ends at round ``until``.

``every`` and ``share`` are the defaults of the authors' code (bibikar/feddst), whose examples use 15 and 0.01 for
CIFAR-10. That code multiplies by ``share`` twice, so that its first share is 0.25 for 0.5; here it is 0.5. There
``until`` is half of the rounds (200 of 400), which a policy cannot see, and ``after`` is all 10 epochs of a round.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.errors import check_number, check_whole
from fedcover.masks.part_sizes import PartSizes, PooledSizes
from fedcover.params import Params
from fedcover.policies.base import ClientPlan, Policy, RoundFeedback, State, Traits, check_bound, shown_in
from fedcover.policies.registry import register
from fedcover.policies.shared_mask import largest, least_keep, magnitudes, state_with, whole_part
from fedcover.seeding import Round
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.training.options import Regrow, TrainingOptions


@dataclass(frozen=True)
class FedDst(Policy):
    """One mask, as dense as the least keep of any cohort so far; its density may only fall."""

    every: int = 10
    share: float = 0.5
    until: int = 100
    after: int = 1
    """Local epochs before readjustment; in a round of fewer epochs it follows the last."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("every", "until", "after"):
            check_whole(name, getattr(self, name), 1)
        check_number("share", self.share, 0, 1 + 1e-9, "a number in (0, 1]")

    def traits(self) -> Traits:
        """Declare that ``plan`` works on any device, and that the mask is that of the global model too."""
        return Traits(any_device=True, prunes_global_model=True, regrows=True)

    def bind(self, structure: ModelStructure) -> "FedDst":
        """Return this policy with the model's hidden weight tensors."""
        return replace(self, shapes={name: structure.shapes[name] for name in hidden_weights(structure, "FedDST")})

    def part_sizes(self, structure: ModelStructure) -> PartSizes:
        """Return what clients hold at most: a share of all hidden weights together."""
        return PooledSizes(structure, list(self.shapes))

    def plan(
        self, theta: Params, cohort: Sequence[Client], this_round: Round, state: State
    ) -> tuple[list[ClientPlan], State]:
        """Return the previous mask, a random one at first; pruned by magnitude if a client can hold less.

        In every ``every``-th round all clients readjust it.
        """
        check_bound(self.shapes, "FedDST")
        keep, mask = least_keep(cohort, state, self), shown_in(state)
        if not mask:
            mask = self._first(theta, keep, this_round)
        elif keep < float(state["keep"]):
            counts = erk_counts(self.shapes, keep)
            scores = magnitudes(theta, list(self.shapes), mask)
            mask = {n: largest({n: scores[n]}, min(counts[n], int(mask[n].sum())))[n] for n in self.shapes}
        share = self.share_at(this_round.index)
        options = TrainingOptions(regrow=Regrow(share, self.after)) if share else None
        return [ClientPlan(client, mask, options) for client in cohort], state_with(keep, mask)

    def observe(self, theta: Params, feedback: RoundFeedback, this_round: Round, state: State) -> State:
        """Return the mask of the largest weights that any client holds, in each layer as many as before."""
        before = shown_in(state)
        scores = magnitudes(theta, list(before), {name: feedback.counts[name] > 0 for name in before})
        return state_with(float(state["keep"]), {n: largest({n: scores[n]}, int(before[n].sum()))[n] for n in before})

    def share_at(self, index: int) -> float:
        """Return the share of active weights that a round exchanges; 0 if the mask stays.

        >>> FedDst(every=10, share=0.5, until=100).share_at(50), FedDst().share_at(51)
        (0.25, 0.0)
        """
        if index % self.every or index >= self.until:
            return 0.0
        return self.share / 2 * (1 + math.cos(math.pi * index / self.until))

    def _first(self, theta: Params, keep: float, this_round: Round) -> dict[str, Tensor]:
        """Return a random mask with the densities of Erdos-Renyi kernels."""
        mask = {}
        for name, count in erk_counts(self.shapes, keep).items():
            order = torch.randperm(theta[name].numel(), generator=this_round.generator("first mask", name))
            mask[name] = (order < count).view(theta[name].shape).to(theta[name].device)
        return mask


def erk_counts(shapes: Mapping[str, tuple[int, ...]], keep: float) -> dict[str, int]:
    """Return how many weights each layer keeps: density proportional to (sum of its axes) / (product of its axes).

    Densities are at most 1. The counts add up to exactly floor(keep d), with at least 1 in each layer.

    >>> erk_counts({"a": (10, 10), "b": (100, 10)}, 0.2)
    {'a': 34, 'b': 186}
    """
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = max(len(sizes), whole_part(keep, sum(sizes.values())))
    dense: set[str] = set()
    while True:
        room = total - sum(sizes[name] for name in dense)
        each = room / max(1, sum(sum(shapes[name]) for name in sizes if name not in dense))
        over = {name for name in sizes if name not in dense and each * sum(shapes[name]) >= sizes[name]}
        if not over:
            break
        dense |= over
    wanted = {name: float(sizes[name]) if name in dense else each * sum(shapes[name]) for name in sizes}
    counts = {name: max(1, math.floor(want)) for name, want in wanted.items()}
    while (missing := total - sum(counts.values())) != 0:
        step = 1 if missing > 0 else -1
        able = [name for name in counts if (counts[name] < sizes[name] if missing > 0 else counts[name] > 1)]
        nearest = max(able, key=lambda name: step * (wanted[name] - counts[name]))
        counts[nearest] += step
    return counts


@register("FedDST")
def feddst(every: int = 10, share: float = 0.5, until: int = 100, after: int = 1) -> FedDst:
    """FedDST: one sparse mask for all clients, as dense as the least able one can hold, that drops and grows weights.

    Args:
        every: Rounds between readjustments.
        share: First share of the active weights that is exchanged, in (0, 1].
        until: Round at which readjustment ends.
        after: Local epochs before a readjustment.
    """
    return FedDst(every, share, until, after)
