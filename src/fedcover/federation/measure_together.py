"""What is measured of the masks of many runs: on a GPU all at once, which saves thousands of launches and waits.

The results are those of single runs: counts are equal, and norms equal up to rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch

from fedcover.federation.layer_coverage import LayerCounts, count_rows
from fedcover.federation.planned_round import PlannedRound
from fedcover.masks.noise import queue_together
from fedcover.params import HostCopy, device_of, entries_of, flat_mask, most_together, spans_of

SINGLE: tuple[str, ...] = ("cpu",)
"""Devices on which each run is measured by itself: launches cost little there, and results are exact."""


def queue_noise(rounds: Sequence[PlannedRound]) -> None:
    """Start to compute the pruning noise of rounds, as far as they can be measured together."""
    for part in _alike(rounds):
        queue_together([planned.pruning for planned in part])


def queue_coverage(rounds: Sequence[PlannedRound]) -> None:
    """Start to compute the coverage of rounds, as far as they can be measured together."""
    for part in _alike(rounds):
        theta, clients = part[0].state.theta, len(part[0].masks)
        together = max(1, most_together(entries_of(theta), device_of(theta)) // clients)
        for start in range(0, len(part), together):
            _cover(part[start : start + together])


def _alike(rounds: Sequence[PlannedRound]) -> list[list[PlannedRound]]:
    """Return the rounds on a GPU in groups of equal shapes and numbers of clients; large models are left out."""
    groups: dict[Any, list[PlannedRound]] = {}
    for planned in rounds:
        theta = planned.state.theta
        if (device := device_of(theta)).type not in SINGLE and len(spans_of(theta)) == 1:
            shapes = tuple((name, tensor.shape) for name, tensor in theta.items())
            groups.setdefault((device, len(planned.masks), shapes), []).append(planned)
    return list(groups.values())


def _cover(rounds: Sequence[PlannedRound]) -> None:
    """Compute the coverage of rounds at once, of its entries and of its tensors."""
    theta = rounds[0].state.theta
    sizes = {name: tensor.numel() for name, tensor in theta.items()}
    whole = torch.ones((), dtype=torch.bool, device=device_of(theta)).expand(sum(sizes.values()))
    rows = [flat_mask(m, planned.state.theta) if m else whole for planned in rounds for m in planned.masks]
    counts = torch.stack(rows).view(len(rounds), -1, len(whole)).sum(1, dtype=torch.int32)
    # Copies, so that a change of one tensor names the right one.
    parts = dict(zip(theta, torch.ops.aten.split_with_sizes_copy(counts, list(sizes.values()), 1), strict=True))
    names = [name for name, size in sizes.items() if size]
    facts = HostCopy(torch.stack([count_rows(parts[name]) for name in names], 1))
    for number, planned in enumerate(rounds):
        coverage = {name: part[number].view(theta[name].shape) for name, part in parts.items()}
        planned.use_coverage(coverage, LayerCounts(sizes, names, facts, number))
