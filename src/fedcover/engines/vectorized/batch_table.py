"""The batches of many clients as one table: the examples of each client at each step.

Clients have different numbers of examples, so the table is padded with the index -1: at the end of short
batches, and for all of the steps that a client does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.training.client import Job, shuffle_draws


@dataclass(frozen=True)
class BatchTable:
    """The batches of clients that are trained together."""

    index: Tensor
    """The index of the example at (step, client, position in the batch); -1 for padding."""
    full: bool
    """True if every batch is full, apart from the steps of clients that have finished."""
    last_epoch: Tensor
    """True at (step, client) if the step belongs to the client's last epoch."""


def batch_table(jobs: Sequence[Job], device: torch.device) -> BatchTable:
    """Return the table of jobs that share a batch size; the order of examples is that of ``train_client``."""
    batch, sizes = jobs[0].recipe.batch_size, [job.examples for job in jobs]
    sized = [(job.recipe, size) for job, size in zip(jobs, sizes, strict=True)]
    steps = [recipe.steps_per_epoch(size) for recipe, size in sized]
    passes = [recipe.passes(size) for recipe, size in sized]
    totals = [recipe.steps(size) for recipe, size in sized]
    columns, epochs = max(steps) * batch, max(passes)
    # Padding sorts behind all examples.
    pin = device.type == "cuda"
    draws = torch.full((len(jobs), epochs, columns), 2.0, pin_memory=pin)
    owned = torch.full((len(jobs), columns), -1, dtype=torch.long, pin_memory=pin)
    for row, (job, size) in enumerate(zip(jobs, sizes, strict=True)):
        draws[row, : passes[row], :size] = shuffle_draws(job, size)
        owned[row, :size] = job.population.indices(job.client.id)
    order = draws.to(device, non_blocking=True).argsort(stable=True, dim=2)
    index = owned.to(device, non_blocking=True).unsqueeze(1).expand(-1, epochs, -1).gather(2, order)
    index = index.view(len(jobs), epochs, max(steps), batch)
    epoch = torch.arange(epochs, device=device).view(1, epochs, 1).expand(len(jobs), -1, max(steps))
    passed = to_device(passes, device).view(-1, 1)
    if min(steps) < max(steps) or min(passes) < max(passes):
        index = index.masked_fill((epoch >= passed.unsqueeze(2)).unsqueeze(3), -1)
        # Close the gaps between a small client's epochs, so that its steps are consecutive as in serial training.
        real = (index >= 0).any(3).view(len(jobs), -1)
        close = (~real).to(torch.int8).argsort(stable=True, dim=1)
        flat = index.view(len(jobs), -1, batch)
        index = flat.gather(1, close.unsqueeze(2).expand_as(flat)).view_as(index)
        epoch = epoch.reshape(len(jobs), -1).gather(1, close).view(len(jobs), epochs, -1)
    most = max(totals)  # fewer than the rows if local_steps cuts the last epoch
    index = index.reshape(len(jobs), -1, batch)[:, :most]
    if min(totals) < most:
        taken = torch.arange(most, device=device) < to_device(totals, device).unsqueeze(1)
        index = index.masked_fill(~taken.unsqueeze(2), -1)
    index = index.transpose(0, 1).contiguous()
    last = (epoch.reshape(len(jobs), -1)[:, :most] == passed - 1).transpose(0, 1)
    full = all(size % batch == 0 for size in sizes)
    return BatchTable(index, full, last & (index >= 0).any(2))


def to_device(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return numbers as a tensor on a device; a copy to a GPU is asynchronous."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
