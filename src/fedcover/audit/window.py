"""The coverage of weights over a window of rounds, for masks of whole units.

A weight between two hidden layers is held only by clients that hold both its units, so a single round may leave it
without a holder although every unit has one. ``audit_rounds`` counts the coverage of any policy; here the share of
covered weights in the worst round, and the pruning noise, are measured too.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.masks.coverage import coverage_of, gamma_min, uncovered
from fedcover.masks.noise import pruning_noise
from fedcover.params import Mask, Params
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import find_groups

MODEL = ""
"""The key of the whole model beside those of its tensors."""


@dataclass(frozen=True)
class LayerWindow:
    """The coverage of one tensor's weights over a window of rounds."""

    layer: str
    pairs: bool
    """Whether the tensor lies between two hidden layers, so that a weight needs a client that holds both its units."""
    covered: float
    """The fraction of its weights that a client held in at least one round."""
    gamma_min: int
    """The least coverage of any weight, summed over all rounds."""
    covered_each: float
    """The fraction of its weights with a holder, in the worst round."""
    gamma_min_each: int
    """The least coverage of any weight in any single round."""


@dataclass(frozen=True)
class WindowCoverage:
    """The coverage of a model's weights over a window of rounds; the fields are those of ``LayerWindow``."""

    rounds: int
    covered: float
    gamma_min: int
    covered_each: float
    gamma_min_each: int
    mean_noise: float
    """delta^2, the mean over clients and rounds."""
    layers: list[LayerWindow]
    """The same of each pruned weight tensor."""


def measure_window(
    structure: ModelStructure, theta: Params, plan: Callable[[int], Sequence[Mask]], rounds: int
) -> WindowCoverage:
    """Return the coverage of weights over rounds 1 to ``rounds`` with theta as it is.

    Args:
        structure: The traced model.
        theta: Its parameters.
        plan: Returns the masks of the round with this index.
        rounds: The number of rounds.
    """
    total = {name: torch.zeros_like(tensor, dtype=torch.int32) for name, tensor in theta.items()}
    by_round, noise = [], []
    for index in range(1, rounds + 1):
        masks = plan(index)
        counts = coverage_of(masks, theta)
        by_round.append(_coverages(counts))
        noise += pruning_noise(theta, masks)
        total = {name: total[name] + counts[name] for name in total}
    together = _coverages(total)
    worst = {
        name: (min(each[name][0] for each in by_round), min(each[name][1] for each in by_round)) for name in together
    }
    members = {(member.tensor, member.axis) for group in find_groups(structure) for member in group.members}
    axes = Counter(tensor for tensor, _ in members)
    layers = [
        LayerWindow(name, axes[name] > 1, *together[name], *worst[name])
        for name, tensor in theta.items()
        if name in axes and tensor.ndim > 1
    ]
    return WindowCoverage(rounds, *together[MODEL], *worst[MODEL], sum(noise) / len(noise), layers)


def _coverages(counts: Mapping[str, Tensor]) -> dict[str, tuple[float, int]]:
    """Return the covered fraction and the least coverage of the whole model and of each tensor."""
    parts = {MODEL: counts, **{name: {name: total} for name, total in counts.items()}}
    return {name: (1 - uncovered(part), gamma_min(part)) for name, part in parts.items()}
