"""Clients distributed over CPU cores: worker processes that share data and models and receive jobs.

Workers are forked, so they inherit tasks and data without copies. A job is sent through a pipe as a few
numbers; theta, masks, trained values and gradient reports are in shared memory. Each worker runs one thread,
so results are bit-identical to those of ``Serial`` for any number of workers.
"""

import multiprocessing
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.nn.functional as F
from torch import nn

from fedcover._threads import usable_cores
from fedcover.aggregation.base import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import ClientTrainer, failure
from fedcover.engines.processes.shared_memory import BufferLayout, shared_bytes
from fedcover.engines.processes.worker import (
    JobMessage,
    JobReply,
    SharedBuffers,
    Site,
    moments_in,
    num_moments,
    put_moments,
    work,
)
from fedcover.errors import InputError, check_whole
from fedcover.training.client import Job
from fedcover.training.options import levels_of
from fedcover.training.recipes import LocalSGD, Recipe
from fedcover.training.steps.native import library

FORK_WARNING = r"This process \(pid=\d+\) is multi-threaded"
"""The beginning of a warning of Python."""
AFTER_GPU = "autograd's threading in combination with fork"
"""A part of torch's error in a process that was forked after it computed gradients on a GPU."""


class Processes(Engine):
    """An engine that trains the clients of a round in parallel worker processes.

    Results are bit-identical to those of ``Serial`` with the same ``shrink`` and ``traced``, for any number of
    workers. Workers are started at the first round and stopped when the engine is closed.

    Args:
        workers: The number of worker processes; by default the number of usable cores.
        shrink: Whether to build a physically smaller sub-model from each mask before training.
        traced: Whether to trace a training step once and replay it; False sends every step through autograd.

    Raises:
        InputError: If ``workers`` is not a whole number of 1 or more.

    >>> Processes(workers=2)
    processes, 2 workers
    """

    name = "processes"

    def __init__(self, workers: int | None = None, shrink: bool = True, traced: bool = True) -> None:
        self._pool: _Pool | None = None
        self.workers = workers if workers is not None else usable_cores()
        check_whole("workers", self.workers, 1)
        if not can_fork():
            raise InputError("engine 'processes' needs a system that can fork, such as Linux; use engine 'serial'")
        self.shrink, self.traced = shrink, traced
        self._trainer = ClientTrainer(shrink, traced)

    def __repr__(self) -> str:
        return f"processes, {self.workers} workers"

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Yield one update per job, in the order of the jobs, whichever worker finishes first."""
        if not jobs:
            return
        if self._pool is None or not self._pool.fits(jobs):
            self.close()
            self._pool = _Pool(jobs, self.workers, self._trainer)
        done = False
        try:
            for number, update in enumerate(self._pool.train(jobs), start=1):
                done = number == len(jobs)  # set before the last yield: a caller that counts may stop there
                yield update
        finally:
            if not done:  # after an error or an abandoned iteration, workers may still be training
                self.close()

    def close(self) -> None:
        """Stop the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def __del__(self) -> None:
        self.close()


def can_fork() -> bool:
    """Return whether this system can fork processes."""
    return "fork" in multiprocessing.get_all_start_methods()


@contextmanager
def _without_fork_warnings() -> Iterator[None]:
    """Ignore the warning of Python 3.12 about forks of a process with threads, such as torch's.

    A worker uses none of their locks: it calls torch with one thread, and no GPU.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", FORK_WARNING, DeprecationWarning)
        yield


@dataclass
class _Worker:
    """A worker process, as its parent sees it."""

    process: Any
    pipe: Connection
    buffers: SharedBuffers
    job: int | None = None
    """The index of the job that it is training; None if it is idle."""


class _Pool:
    """Workers forked for certain sites and for a maximum number of different thetas per call."""

    def __init__(self, jobs: Sequence[Job], workers: int, trainer: ClientTrainer) -> None:
        in_c = library() is not None  # compiled if necessary, and loaded once for all workers
        if not (in_c and all(_is_chain(job) for job in jobs)):
            import torch._inductor  # noqa: F401 - tracing needs it; each worker would spend seconds on the import

        self._sites = list({_key(_site(job)): _site(job) for job in jobs}.values())
        self._layouts = [BufferLayout(dict(task.model.named_parameters())) for task, _, _ in self._sites]
        self._max_thetas = len({id(job.theta) for job in jobs})
        self._num_moments = max(map(num_moments, jobs))
        size = max(layout.size for layout in self._layouts)
        self._thetas = [shared_bytes(size) for _ in range(self._max_thetas)]
        context = multiprocessing.get_context("fork")
        self._workers: list[_Worker] = []
        for _ in range(workers):
            parent_end, worker_end = context.Pipe()
            buffers = SharedBuffers.of(self._layouts, self._num_moments)
            unused = [parent_end, *(worker.pipe for worker in self._workers)]
            inherited = (worker_end, unused, self._sites, self._layouts, self._thetas, buffers, trainer)
            process = context.Process(target=work, args=inherited, daemon=True)
            with _without_fork_warnings():
                process.start()
            worker_end.close()
            self._workers.append(_Worker(process, parent_end, buffers))

    def fits(self, jobs: Sequence[Job]) -> bool:
        """Return whether all workers live and have the sites of these jobs and enough buffers for their thetas."""
        sites = set(map(_key, self._sites))
        alive = all(worker.process.is_alive() for worker in self._workers)
        enough = len({id(job.theta) for job in jobs}) <= self._max_thetas
        enough = enough and max(map(num_moments, jobs)) <= self._num_moments
        return alive and enough and all(_key(_site(job)) in sites for job in jobs)

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Yield one update per job, in the order of the jobs."""
        keys = [_key(site) for site in self._sites]
        sites = [keys.index(_key(_site(job))) for job in jobs]
        thetas = self._share_thetas(jobs, sites)
        ready: dict[int, ClientUpdate] = {}
        sent = delivered = 0
        while delivered < len(jobs):
            # A window keeps memory bounded when one client is much slower than the others.
            for worker in self._workers:
                if worker.job is None and sent < min(len(jobs), delivered + 2 * len(self._workers)):
                    self._send(worker, sent, jobs[sent], sites[sent], thetas[id(jobs[sent].theta)])
                    sent += 1
            if delivered not in ready:
                for worker in self._wait(jobs):
                    assert worker.job is not None
                    ready[worker.job] = self._receive(worker, jobs[worker.job], sites[worker.job])
                    worker.job = None
            while delivered in ready:
                yield ready.pop(delivered)
                delivered += 1

    def _share_thetas(self, jobs: Sequence[Job], sites: Sequence[int]) -> dict[int, int]:
        """Copy each theta into a shared buffer; return the buffers' indices by the ids of the thetas."""
        indices: dict[int, int] = {}
        for job, site in zip(jobs, sites, strict=True):
            if id(job.theta) not in indices:
                index = indices[id(job.theta)] = len(indices)
                self._layouts[site].put_params(self._thetas[index], job.theta)
        return indices

    def _send(self, worker: _Worker, number: int, job: Job, site: int, theta: int) -> None:
        layout, options = self._layouts[site], job.options
        mask = layout.put_mask(worker.buffers.mask, job.mask)
        levels, num_widths, distil = tuple[str, ...](), 0, 0.0
        if options is not None and options.widths:
            levels = layout.put_levels(worker.buffers.levels, levels_of(options.widths))
            num_widths, distil = len(options.widths), options.distil
            options = replace(options, widths=(), distil=0.0)
        moments = tuple[str, ...]()
        if options is not None and options.moments:
            moments = put_moments(layout, worker.buffers, job.recipe, options.moments)
            options = replace(options, moments={})
        worker.job = number
        message = JobMessage(
            site,
            theta,
            mask,
            job.client,
            job.recipe.numbers,
            job.this_round,
            options,
            moments,
            levels,
            num_widths,
            distil,
        )
        try:
            worker.pipe.send(message)
        except OSError as error:
            raise failure(job, _death(worker)) from error

    def _wait(self, jobs: Sequence[Job]) -> list[_Worker]:
        """Wait for replies and return the workers that have sent one; raise ClientError if a worker has died."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        sentinels = {worker.process.sentinel: worker for worker in busy.values()}
        ready = wait([*busy, *sentinels])
        replied = [worker for pipe, worker in busy.items() if pipe in ready]
        for sentinel, worker in sentinels.items():
            if sentinel in ready and worker not in replied:
                assert worker.job is not None
                raise failure(jobs[worker.job], _death(worker))
        return replied

    def _receive(self, worker: _Worker, job: Job, site: int) -> ClientUpdate:
        try:
            reply: JobReply = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise failure(job, _death(worker)) from error
        if reply.error is not None:
            if AFTER_GPU in reply.error:
                raise InputError(
                    "engine=processes forks this process, which torch does not allow after gradients were computed on"
                    " a GPU in it; start a new process, or use engine=serial or engine=vectorized"
                )
            raise failure(job, reply.error)
        layout, buffers, mask, report = self._layouts[site], worker.buffers, job.mask, None
        if job.options is not None and job.options.regrow:
            mask = {name: kept.clone() for name, kept in layout.mask(buffers.mask, tuple(mask)).items()}
        if job.options is not None and job.options.report:
            report = {name: view.clone() for name, view in layout.params(buffers.report).items()}
        theta, moments = layout.kept(buffers.theta, mask), None
        if reply.moments:
            views = moments_in(layout, buffers, job.recipe, reply.moments)
            moments = {moment: {name: view.clone() for name, view in named.items()} for moment, named in views.items()}
        return ClientUpdate(
            job.client.id, theta, mask, reply.examples, reply.train_loss, report=report, moments=moments
        )

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []


def _is_chain(job: Job) -> bool:
    """Return whether a job looks like one for the C library, so that its steps need not be traced.

    If that is wrong, a worker imports what tracing needs by itself.
    """
    layers = [module for module in job.task.model.modules() if module._parameters]
    simple = all(isinstance(layer, nn.Linear | nn.Conv2d) for layer in layers) and job.task.loss is F.cross_entropy
    plain = job.options is None or not job.options.has_beyond("complement")
    return simple and plain and isinstance(job.recipe, LocalSGD) and job.recipe.is_plain


def _site(job: Job) -> Site:
    return job.task, job.population, job.recipe.template


def _key(site: Site) -> tuple[int, int, int, Recipe]:
    """Return what sites share if workers need not tell them apart; each federation fits its own copy of a task."""
    task, population, template = site
    return id(task.model), id(task.loss), id(population), template


def _death(worker: _Worker) -> str:
    """Return why a worker process ended."""
    worker.process.join(5)
    code = worker.process.exitcode
    if code is not None and code < 0:
        hint = "; the machine may be out of memory: use fewer workers" if -code == signal.SIGKILL else ""
        return f"its worker process was killed by signal {-code}{hint}"
    return f"its worker process ended with exit code {code}"
