"""Masks that clients readjust during training: between two steps, outside what is compiled or captured."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.options import regrown_each

MOST_AT_ONCE = 64
"""The number of clients that readjust at once: sorting takes several times the memory of what is sorted."""


@dataclass(frozen=True)
class Readjustment:
    """One client's readjustment of its mask."""

    row: int
    """The client's row in the stacks."""
    batch: int
    """The step whose batch the gradients are computed on."""
    share: float


def readjustments(jobs: Sequence[Job]) -> dict[int, list[Readjustment]]:
    """Return the readjustments by the number of steps before them; clients have epochs of different lengths."""
    by_step: dict[int, list[Readjustment]] = {}
    for row, job in enumerate(jobs):
        regrow = job.options.regrow if job.options else None
        if regrow and job.mask:
            epochs = job.recipe.epochs
            per_epoch = job.recipe.steps(job.population.size(job.client.id)) // epochs
            readjustment = Readjustment(row, min(regrow.after, epochs - 1) * per_epoch, regrow.share)
            by_step.setdefault(min(regrow.after, epochs) * per_epoch, []).append(readjustment)
    return by_step


def regrow_rows(theta: Params, velocity: Params, masks: Params, grads: Params, rows: Tensor, shares: Tensor) -> None:
    """Readjust some rows of the masks in place; set entries that do not stay active, and their momenta, to 0.

    Args:
        theta: The stacks of parameters.
        velocity: The stacks of momenta.
        masks: The stacks of masks. A row that keeps all of a tensor stays as it is.
        grads: The gradients of these rows only.
        rows: The rows to readjust.
        shares: The share of active entries that each of these rows replaces.
    """
    for name, mask in masks.items():
        if name not in grads:  # it is not trained
            continue
        old = mask[rows]
        new = regrown_each(theta[name][rows], old, grads[name], shares)
        mask.index_copy_(0, rows, new)
        for stack in (theta[name], velocity[name]):
            stack.index_copy_(0, rows, stack[rows].masked_fill_(~(old & new), 0.0))
