"""Masks that clients readjust during training: between two steps, outside what is compiled or captured."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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
            epochs, steps = job.recipe.passes(job.examples), job.recipe.steps(job.examples)
            per_epoch = job.recipe.steps_per_epoch(job.examples)
            readjustment = Readjustment(row, min(regrow.after, epochs - 1) * per_epoch, regrow.share)
            by_step.setdefault(min(regrow.after * per_epoch, steps), []).append(readjustment)
    return by_step


def regrow_rows(
    mask: Tensor, theta: Tensor, moments: Sequence[Tensor], grads: Tensor, rows: Tensor, shares: Tensor
) -> None:
    """Readjust some rows of a tensor's masks in place; set entries that do not stay active, and their moments, to 0.

    Args:
        mask: The stack of masks. A row that keeps all of the tensor stays as it is.
        theta: The stack of values.
        moments: The stacks of the tensor's moments.
        grads: The gradients of these rows only.
        rows: The rows to readjust.
        shares: The share of active entries that each of these rows replaces.
    """
    old = mask[rows]
    new = regrown_each(theta[rows], old, grads, shares)
    mask.index_copy_(0, rows, new)
    for stack in (theta, *moments):
        stack.index_copy_(0, rows, stack[rows].masked_fill_(~(old & new), 0.0))
