"""A worker process: it trains the jobs that arrive through a pipe, with all tensors in shared memory."""

import ctypes
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcover.clients import Client
from fedcover.data import Population
from fedcover.engines.client_trainer import ClientTrainer
from fedcover.engines.processes.shared_memory import BufferLayout, shared_bytes
from fedcover.params import Params
from fedcover.seeding import Round
from fedcover.training.client import Job
from fedcover.training.memory import is_out_of_memory
from fedcover.training.options import TrainingOptions, widths_of
from fedcover.training.recipes import Recipe
from fedcover.training.task import Task

Site = tuple[Task, Population, Recipe]
"""A task, its data and the template of a recipe: what workers inherit, since it may contain functions and classes."""


@dataclass(frozen=True)
class SharedBuffers:
    """The memory that a worker shares with its parent; pages that are never touched take no memory."""

    mask: torch.Tensor
    levels: torch.Tensor
    """For each entry, the number of width masks that contain it."""
    theta: torch.Tensor
    """The trained values."""
    report: torch.Tensor
    """The gradient report."""
    moments: tuple[torch.Tensor, ...]
    """One buffer for each moment that a recipe keeps, before and after training."""

    @classmethod
    def of(cls, layouts: Sequence[BufferLayout], num_moments: int) -> "SharedBuffers":
        """Return buffers that are large enough for each of several models."""
        size, entries = max(layout.size for layout in layouts), max(layout.entries for layout in layouts)
        wide = max(layout.counts.size for layout in layouts)
        moments = tuple(shared_bytes(wide) for _ in range(num_moments))
        return cls(shared_bytes(entries), shared_bytes(entries), shared_bytes(size), shared_bytes(size), moments)


class JobMessage(NamedTuple):
    """A job as it is sent to a worker; its tensors are in shared memory."""

    site: int
    theta: int
    """The index of the shared buffer with the job's theta."""
    mask: tuple[str, ...]
    """The names of the tensors in the mask."""
    client: Client
    numbers: dict[str, Any]
    """The recipe's numbers, which complete the template of the site."""
    this_round: Round
    options: TrainingOptions | None
    """The training options without their widths and moments."""
    moments: tuple[str, ...]
    """The names of the tensors that have moments from an earlier round."""
    levels: tuple[str, ...]
    """The names of the tensors that widths mask."""
    num_widths: int
    distil: float


class JobReply(NamedTuple):
    """A worker's reply; the trained values are in shared memory."""

    examples: int
    train_loss: float
    moments: tuple[str, ...] = ()
    """The names of the tensors whose moments are kept."""
    error: str | None = None


def work(
    pipe: Connection,
    unused: Sequence[Connection],
    sites: Sequence[Site],
    layouts: Sequence[BufferLayout],
    thetas: Sequence[torch.Tensor],
    buffers: SharedBuffers,
    trainer: ClientTrainer,
) -> None:
    """Train the jobs that arrive through the pipe until it closes: the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    _die_with_parent()
    torch.set_num_threads(1)
    for connection in unused:
        connection.close()
    while True:
        try:
            message: JobMessage = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            site, layout = sites[message.site], layouts[message.site]
            reply = _train(message, site, layout, layout.params(thetas[message.theta]), buffers, trainer)
        except Exception as error:
            reason = "its worker ran out of memory; use fewer workers" if is_out_of_memory(error) else str(error)
            reply = JobReply(0, 0.0, error=reason or type(error).__name__)
        pipe.send(reply)


def _train(
    message: JobMessage,
    site: Site,
    layout: BufferLayout,
    theta: dict[str, torch.Tensor],
    buffers: SharedBuffers,
    trainer: ClientTrainer,
) -> JobReply:
    """Train the job of a message and write its update into the shared buffers."""
    mask, options = layout.mask(buffers.mask, message.mask), message.options
    if options is not None and message.num_widths:
        widths = widths_of(layout.levels(buffers.levels, message.levels), message.num_widths)
        options = replace(options, widths=widths, distil=message.distil)
    task, population, template = site
    recipe = replace(template, **message.numbers)
    if options is not None and message.moments:
        options = replace(options, moments=moments_in(layout, buffers, recipe, message.moments))
    job = Job(task, population, message.client, theta, mask, recipe, message.this_round, options)
    update = trainer.train(job)
    layout.put_kept(buffers.theta, update.theta, update.mask)
    if update.mask is not mask:
        layout.put_mask(buffers.mask, update.mask)
    if update.report is not None:
        layout.put_params(buffers.report, update.report)
    kept = put_moments(layout, buffers, recipe, update.moments) if update.moments else ()
    return JobReply(update.examples, update.train_loss, kept)


def num_moments(job: Job) -> int:
    """Return the number of moments that a job's recipe keeps."""
    return len(job.recipe.moment_names) if job.recipe.keep_moments else 0


def put_moments(
    layout: BufferLayout, buffers: SharedBuffers, recipe: Recipe, moments: Mapping[str, Mapping[str, Tensor]]
) -> tuple[str, ...]:
    """Write moments into the shared buffers, in the order of their names in the recipe; return the tensors' names."""
    for memory, moment in _moment_buffers(buffers, recipe):
        _layout_of(moment, layout).put_params(memory, moments[moment])
    return tuple(moments[recipe.moment_names[0]])


def moments_in(
    layout: BufferLayout, buffers: SharedBuffers, recipe: Recipe, names: tuple[str, ...]
) -> dict[str, Params]:
    """Return the moments that ``put_moments`` wrote, as views of the buffers."""
    stored = {moment: _layout_of(moment, layout).params(memory) for memory, moment in _moment_buffers(buffers, recipe)}
    return {moment: {name: views[name] for name in names} for moment, views in stored.items()}


def _moment_buffers(buffers: SharedBuffers, recipe: Recipe) -> Iterator[tuple[torch.Tensor, str]]:
    """Return the buffer of each of the recipe's moments; another recipe of the pool may have more of them."""
    return zip(buffers.moments[: len(recipe.moment_names)], recipe.moment_names, strict=True)


def _layout_of(moment: str, layout: BufferLayout) -> BufferLayout:
    return layout.counts if moment == "count" else layout


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even by ``kill -9``, so that no orphans remain."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
