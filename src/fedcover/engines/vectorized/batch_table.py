"""The batches of many clients as one table: the examples of each client at each step.

Clients have different numbers of examples, so the table is padded with the index -1: at the end of short
batches, and for all of the steps that a client does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcover.engines.vectorized.client_indices import ClientIndices
from fedcover.training.client import Job, draw_shuffle


@dataclass(frozen=True)
class BatchTable:
    """The batches of clients that are trained together."""

    index: Tensor
    """The index of the example at (step, client, position in the batch); -1 for padding."""
    full: bool
    """True if every batch is full, apart from the steps of clients that have finished."""
    last_epoch: Tensor
    """True at (step, client) if the step belongs to the client's last epoch."""


class _Length(NamedTuple):
    """How much a client trains in a round."""

    size: int
    """The number of its examples."""
    steps: int
    """The number of batches of an epoch."""
    passes: int
    """The number of epochs that it begins."""
    total: int
    """The number of its steps."""


def batch_table(jobs: Sequence[Job], indices: ClientIndices) -> BatchTable:
    """Return the table of jobs that share a batch size; the order of examples is that of ``train_client``.

    Args:
        jobs: The jobs.
        indices: The indices of the clients' examples, on the device of the table.
    """
    batch, device, lengths = jobs[0].recipe.batch_size, indices.device, _lengths(jobs)
    sizes, steps, passes, totals = zip(*lengths, strict=True)
    shape = (len(jobs), max(passes), max(steps), batch)
    order = _orders(jobs, lengths, (shape[1], shape[2] * batch), device)
    starts = to_device(indices.starts(jobs), device).view(-1, 1, 1)
    if min(sizes) == shape[2] * batch:
        index = indices.all.take(starts + order).view(shape)
    else:  # padding was sorted behind all examples
        real = order < to_device(sizes, device).view(-1, 1, 1)
        index = torch.where(real, indices.all.take(starts + torch.where(real, order, 0)), -1).view(shape)
    epoch = torch.arange(shape[1], device=device).view(1, -1, 1).expand(shape[:3])
    passed = to_device(passes, device).view(-1, 1)
    if min(steps) < max(steps) or min(passes) < max(passes):
        index = index.masked_fill((epoch >= passed.unsqueeze(2)).unsqueeze(3), -1)
        # Close the gaps between a small client's epochs, so that its steps are consecutive as in serial training.
        real = (index >= 0).any(3).view(len(jobs), -1)
        close = (~real).to(torch.int8).argsort(stable=True, dim=1)
        flat = index.view(len(jobs), -1, batch)
        index = flat.gather(1, close.unsqueeze(2).expand_as(flat)).view_as(index)
        epoch = epoch.reshape(len(jobs), -1).gather(1, close).view_as(epoch)
    most = max(totals)  # fewer than the rows if local_steps cuts the last epoch
    index = index.reshape(len(jobs), -1, batch)[:, :most]
    if min(totals) < most:
        taken = torch.arange(most, device=device) < to_device(totals, device).unsqueeze(1)
        index = index.masked_fill(~taken.unsqueeze(2), -1)
    index = index.transpose(0, 1).contiguous()
    last = (epoch.reshape(len(jobs), -1)[:, :most] == passed - 1).transpose(0, 1)
    full = all(size % batch == 0 for size in sizes)
    return BatchTable(index, full, last & (index >= 0).any(2))


def _lengths(jobs: Sequence[Job]) -> list[_Length]:
    """Return how much each client trains; clients with the same recipe and number of examples share it."""
    shared: dict[tuple[int, int], _Length] = {}
    lengths = []
    for job in jobs:
        recipe, size = job.recipe, job.examples
        length = shared.get((id(recipe), size))
        if length is None:
            length = _Length(size, recipe.steps_per_epoch(size), recipe.passes(size), recipe.steps(size))
            shared[id(recipe), size] = length
        lengths.append(length)
    return lengths


def _orders(jobs: Sequence[Job], lengths: Sequence[_Length], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return the order of each client's examples as (client, epoch, position), with padding behind them.

    Runs in lockstep that share a seed also share their clients' random numbers, which are drawn and sorted once.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    number_of = [
        numbers.setdefault((job.this_round, job.client.id, length.size, length.passes), len(numbers))
        for job, length in zip(jobs, lengths, strict=True)
    ]
    first = dict(zip(reversed(number_of), reversed(range(len(jobs))), strict=True))
    chosen = [first[number] for number in range(len(numbers))]
    draws = _draws([jobs[n] for n in chosen], [lengths[n] for n in chosen], shape, device)
    order = draws.argsort(stable=True, dim=2)
    return order if len(numbers) == len(jobs) else order.index_select(0, to_device(number_of, device))


def _draws(jobs: Sequence[Job], lengths: Sequence[_Length], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return a random number in [0, 1) for each (client, epoch, example), and 2 for padding."""
    counts = [length.passes * length.size for length in lengths]
    flat, rng = torch.empty(sum(counts), pin_memory=device.type == "cuda"), torch.Generator()
    for job, part in zip(jobs, flat.split(counts), strict=True):
        draw_shuffle(job, rng, part)
    flat = flat.to(device, non_blocking=True)
    if all((length.passes, length.size) == shape for length in lengths):
        return flat.view(-1, *shape)
    sizes, passes = (
        to_device(n, device).view(-1, 1, 1) for n in ([x.size for x in lengths], [x.passes for x in lengths])
    )
    starts = to_device(list(accumulate(counts[:-1], initial=0)), device).view(-1, 1, 1)
    epoch, example = torch.arange(shape[0], device=device).view(-1, 1), torch.arange(shape[1], device=device)
    real = (epoch < passes) & (example < sizes)
    return torch.where(real, flat.take(torch.where(real, starts + epoch * sizes + example, 0)), 2.0)


def to_device(
    values: Sequence[float] | Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.long
) -> Tensor:
    """Return numbers as a tensor on a device; a copy to a GPU is asynchronous."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
