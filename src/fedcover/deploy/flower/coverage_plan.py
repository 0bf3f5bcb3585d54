"""The file in a run folder that says what a round loses if a node is missing.

A server's app writes it when a round begins, from the masks of that round; ``fedcover deploy status`` shows it.
"""

import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.federation.planned_round import PlannedRound
from fedcover.masks.coverage import coverage_of, uncovered
from fedcover.params import Mask, Params

PLAN = "planned_round.json"
MAX_ENTRIES = 4_000_000_000
"""Entries of all masks up to which this is computed; beyond, it would take seconds, and is left out."""


def shares_without(masks: Sequence[Mask], theta: Params) -> tuple[float, list[float]]:
    """Return the share of entries that no mask keeps, and the share that none would keep without each of the masks.

    >>> import torch
    >>> theta = {"w": torch.zeros(4)}
    >>> first, second = {"w": torch.tensor([1, 1, 1, 0]).bool()}, {"w": torch.tensor([1, 0, 0, 0]).bool()}
    >>> shares_without([first, second], theta)
    (0.25, [0.75, 0.25])
    """
    counts = coverage_of(masks, theta)
    bare, total = uncovered(counts), sum(count.numel() for count in counts.values())
    single = {name: count == 1 for name, count in counts.items()}
    lost = [
        sum(int((only & mask[name] if name in mask else only).sum()) for name, only in single.items()) for mask in masks
    ]
    return bare, [bare + entries / total for entries in lost]


def write_plan(folder: Path, planned: PlannedRound, numbers: Sequence[int], asked: Collection[int]) -> None:
    """Write what a round loses if one of the clients that are asked to train is missing.

    Args:
        folder: The run folder.
        planned: The round.
        numbers: The number of each client, by its position in the federation.
        asked: The positions of the clients that are online and are asked to train.
    """
    theta = planned.state.theta
    plans = [plan for plan in planned.plans if plan.client.id in asked]
    content: dict[str, object] = {"round": planned.this_round.index}
    if plans and len(plans) * sum(tensor.numel() for tensor in theta.values()) <= MAX_ENTRIES:
        bare, lost = shares_without([plan.mask for plan in plans], theta)
        without = {str(numbers[plan.client.id]): share for plan, share in zip(plans, lost, strict=True)}
        content |= {"uncovered": bare, "without": without}
    with suppress(InputError):  # the round itself does not need the file
        write_atomically(folder / PLAN, json.dumps(content) + "\n")
