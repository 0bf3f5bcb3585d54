"""The batches of many clients as one table: which example each client meets at each step.

Clients have different numbers of examples, so the table is padded: a place that stands for no
example has index -1, a step that stands for no batch has all of them -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedcover.training.client import Job, shuffle_draws


@dataclass(frozen=True)
class BatchTable:
    """Index of the example at (step, client, place in the batch); -1 where there is none."""

    index: Tensor
    full: bool
    """Whether there is no padding at all."""
    last_epoch: Tensor
    """Whether (step, client) belongs to the client's last epoch."""


def batch_table(jobs: Sequence[Job], device: torch.device) -> BatchTable:
    """The table of these jobs, which share a recipe; its order of examples is that of ``train_client``."""
    recipe = jobs[0].recipe
    batch, epochs = recipe.batch_size, recipe.epochs
    sizes = [job.population.size(job.client.id) for job in jobs]
    steps = [-(-size // batch) for size in sizes]
    places = max(steps) * batch
    # Places without an example sort behind all others.
    pin = device.type == "cuda"
    draws = torch.full((len(jobs), epochs, places), 2.0, pin_memory=pin)
    owned = torch.full((len(jobs), places), -1, dtype=torch.long, pin_memory=pin)
    for row, (job, size) in enumerate(zip(jobs, sizes, strict=True)):
        draws[row, :, :size] = shuffle_draws(job, size)
        owned[row, :size] = job.population.indices(job.client.id)
    order = draws.to(device, non_blocking=True).argsort(stable=True, dim=2)
    index = owned.to(device, non_blocking=True).unsqueeze(1).expand(-1, epochs, -1).gather(2, order)
    index = index.view(len(jobs), epochs, max(steps), batch)
    epoch = torch.arange(epochs, device=device).view(1, epochs, 1).expand(len(jobs), -1, max(steps))
    if min(steps) < max(steps):
        # Close the gaps between a small client's epochs, so that its steps follow one another as they do alone.
        real = (index >= 0).any(3).view(len(jobs), -1)
        close = (~real).to(torch.int8).argsort(stable=True, dim=1)
        flat = index.view(len(jobs), -1, batch)
        index = flat.gather(1, close.unsqueeze(2).expand_as(flat)).view_as(index)
        epoch = epoch.reshape(len(jobs), -1).gather(1, close).view(len(jobs), epochs, -1)
    index = index.reshape(len(jobs), -1, batch).transpose(0, 1).contiguous()
    last = (epoch.reshape(len(jobs), -1) == epochs - 1).transpose(0, 1)
    return BatchTable(index, min(sizes) == places, last & (index >= 0).any(2))


def moved(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Numbers on a device, whole ones if nothing is said; a GPU takes them when it gets to it, and nobody waits."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
