"""Masks that many clients readjust in mid-training: between two steps, outside what is compiled or captured."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.options import regrown_each

TOGETHER = 64
"""So many clients readjust at once: sorting takes several times the memory of what is sorted."""


@dataclass(frozen=True)
class Turn:
    """One client's readjustment."""

    row: int
    """Its place among the clients that are trained together."""
    batch: int
    """The step whose batch the gradients are taken on."""
    share: float


def turns_of(jobs: Sequence[Job]) -> dict[int, list[Turn]]:
    """Who readjusts, by the number of steps that come before; clients have epochs of different lengths."""
    found: dict[int, list[Turn]] = {}
    for row, job in enumerate(jobs):
        regrow = job.options.regrow if job.options else None
        if regrow and job.mask:
            epochs = job.recipe.epochs
            each = job.recipe.steps(job.population.size(job.client.id)) // epochs
            turn = Turn(row, min(regrow.after, epochs - 1) * each, regrow.share)
            found.setdefault(min(regrow.after, epochs) * each, []).append(turn)
    return found


def regrow_rows(theta: Params, velocity: Params, masks: Params, grads: Params, rows: Tensor, shares: Tensor) -> None:
    """Readjust some rows of the masks, in place; what does not stay is 0 and at rest.

    ``grads`` has these rows alone. Where a mask holds all of a tensor there is nothing to exchange.
    """
    for name, mask in masks.items():
        if name not in grads:  # it is not trained
            continue
        old = mask[rows]
        new = regrown_each(theta[name][rows], old, grads[name], shares)
        mask.index_copy_(0, rows, new)
        for stack in (theta[name], velocity[name]):
            stack.index_copy_(0, rows, stack[rows].masked_fill_(~(old & new), 0.0))
