"""Clients over CPU cores: worker processes that hold data and models once and take jobs.

Workers are forked, so they inherit tasks and data without copies. A job goes over a pipe as a few
numbers; theta, masks, trained values and reports lie in shared memory. Each worker runs one thread,
so results are those of ``Serial``, bit for bit, for any number of workers.
"""

import ctypes
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedcover._threads import usable_cores
from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.data import Population
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import ClientTrainer, failure
from fedcover.engines.processes.shared_memory import BufferLayout, shared_bytes
from fedcover.errors import InputError, check_whole
from fedcover.training.client import Job
from fedcover.training.options import levels_of, widths_of
from fedcover.training.steps.native import library
from fedcover.training.task import Task

Site = tuple[Task, Population]


class Processes(Engine):
    """Trains a round's clients in parallel; ``workers`` defaults to the number of usable cores."""

    name = "processes"

    def __init__(self, workers: int | None = None, shrink: bool = False, traced: bool = True) -> None:
        self._pool: _Pool | None = None
        self.workers = workers if workers is not None else usable_cores()
        check_whole("workers", self.workers, 1)
        if not can_fork():
            raise InputError("engine 'processes' needs a system that can fork, such as Linux; use engine 'serial'")
        self._bench = ClientTrainer(shrink, traced)

    def __repr__(self) -> str:
        return f"processes, {self.workers} workers"

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """The jobs' updates in their own order, whoever is ready first."""
        if not jobs:
            return
        if self._pool is None or not self._pool.fits(jobs):
            self.close()
            self._pool = _Pool(jobs, self.workers, self._bench)
        done = False
        try:
            for number, update in enumerate(self._pool.train(jobs), start=1):
                done = number == len(jobs)  # known before the last is handed over: readers count, and may stop there
                yield update
        finally:
            if not done:  # an error, or a reader who left: workers may be in the middle of something
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


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    desk: "_SharedBuffers"
    job: int | None = None


@dataclass(frozen=True)
class _SharedBuffers:
    """What a worker shares with its parent; memory that nobody touches takes no room."""

    mask: torch.Tensor
    levels: torch.Tensor
    """How many of a drill's widths hold each entry."""
    out: torch.Tensor
    report: torch.Tensor

    @classmethod
    def of(cls, size: int, entries: int) -> "_SharedBuffers":
        return cls(shared_bytes(entries), shared_bytes(entries), shared_bytes(size), shared_bytes(size))


class _Pool:
    """Workers forked for certain sites (tasks with their data) and a certain number of models at once."""

    def __init__(self, jobs: Sequence[Job], workers: int, bench: ClientTrainer) -> None:
        import torch._inductor  # noqa: F401 - tracing needs it; workers would each spend seconds to import it

        library()  # compiled, if it must be, and loaded once for all workers

        self._sites = _distinct([(job.task, job.population) for job in jobs])
        self._layouts = [BufferLayout(dict(task.model.named_parameters())) for task, _ in self._sites]
        self._models = len({id(job.theta) for job in jobs})
        size, entries = (max(getattr(layout, key) for layout in self._layouts) for key in ("size", "entries"))
        self._theta = [shared_bytes(size) for _ in range(self._models)]
        context = multiprocessing.get_context("fork")
        self._workers: list[_Worker] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            desk = _SharedBuffers.of(size, entries)
            others = [worker.pipe for worker in self._workers]
            inherited = (theirs, [ours, *others], self._sites, self._layouts, self._theta, desk, bench)
            process = context.Process(target=_work, args=inherited, daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, desk))

    def fits(self, jobs: Sequence[Job]) -> bool:
        """Whether these jobs are for the sites that the workers know, and not for too many models."""
        known = {(id(task), id(clients)) for task, clients in self._sites}
        alive = all(worker.process.is_alive() for worker in self._workers)
        few = len({id(job.theta) for job in jobs}) <= self._models
        return alive and few and all((id(job.task), id(job.population)) in known for job in jobs)

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        site_of = {(id(task), id(clients)): i for i, (task, clients) in enumerate(self._sites)}
        sites = [site_of[id(job.task), id(job.population)] for job in jobs]
        slots: dict[int, int] = {}
        for job, site in zip(jobs, sites, strict=True):
            if id(job.theta) not in slots:
                slot = slots[id(job.theta)] = len(slots)
                for name, view in self._layouts[site].params(self._theta[slot]).items():
                    view.copy_(job.theta[name])
        ready: dict[int, ClientUpdate] = {}
        given = taken = 0
        while taken < len(jobs):
            # A window keeps memory bounded when one client is much slower than the others.
            for worker in self._workers:
                if worker.job is None and given < min(len(jobs), taken + 2 * len(self._workers)):
                    self._give(worker, given, jobs[given], sites[given], slots[id(jobs[given].theta)])
                    given += 1
            if taken not in ready:
                for worker in self._wait(jobs):
                    assert worker.job is not None
                    ready[worker.job] = self._take(worker, jobs[worker.job], sites[worker.job])
                    worker.job = None
            while taken in ready:
                yield ready.pop(taken)
                taken += 1

    def _give(self, worker: _Worker, number: int, job: Job, site: int, slot: int) -> None:
        layout, options = self._layouts[site], job.options
        names, widths = layout.put_mask(worker.desk.mask, job.mask), None
        if options is not None and options.widths:
            widths = layout.put_levels(worker.desk.levels, levels_of(options.widths)), len(options.widths)
            options = replace(options, widths=(), distil=0.0)
        distil = job.options.distil if job.options else 0.0
        worker.job = number
        try:
            worker.pipe.send((site, slot, names, job.client, job.recipe, job.this_round, options, widths, distil))
        except OSError as error:
            raise failure(job, _death(worker)) from error

    def _wait(self, jobs: Sequence[Job]) -> list[_Worker]:
        """The workers that have answered; an error if one has died."""
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        sentinels = {worker.process.sentinel: worker for worker in busy.values()}
        found = wait([*busy, *sentinels])
        answered = [worker for pipe, worker in busy.items() if pipe in found]
        for sentinel, worker in sentinels.items():
            if sentinel in found and worker not in answered:
                assert worker.job is not None
                raise failure(jobs[worker.job], _death(worker))
        return answered

    def _take(self, worker: _Worker, job: Job, site: int) -> ClientUpdate:
        try:
            examples, train_loss, error = worker.pipe.recv()
        except (EOFError, OSError) as lost:
            raise failure(job, _death(worker)) from lost
        if error is not None:
            raise failure(job, error)
        layout, desk, mask, report = self._layouts[site], worker.desk, job.mask, None
        if job.options is not None and job.options.regrow:
            mask = {name: kept.clone() for name, kept in layout.mask(desk.mask, tuple(mask)).items()}
        if job.options is not None and job.options.report:
            report = {name: view.clone() for name, view in layout.params(desk.report).items()}
        return ClientUpdate(job.client.id, layout.kept(desk.out, mask), mask, examples, train_loss, report=report)

    def close(self) -> None:
        """End the workers, wherever they are."""
        for worker in self._workers:
            worker.pipe.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
        self._workers = []


def _distinct(sites: Sequence[Site]) -> list[Site]:
    return list({(id(task), id(clients)): (task, clients) for task, clients in sites}.values())


def _death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    if code is not None and code < 0:
        hint = "; the machine may be out of memory: use fewer workers" if -code == signal.SIGKILL else ""
        return f"its worker process was killed by signal {-code}{hint}"
    return f"its worker process ended with exit code {code}"


def _work(
    pipe: Connection,
    unused: Sequence[Connection],
    sites: Sequence[Site],
    layouts: Sequence[BufferLayout],
    thetas: Sequence[torch.Tensor],
    desk: _SharedBuffers,
    bench: ClientTrainer,
) -> None:
    """The life of a worker: train what comes over the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is the parent's business
    _die_with_parent()
    torch.set_num_threads(1)
    for other in unused:
        other.close()
    answer: tuple[int, float, str | None]
    while True:
        try:
            site, slot, names, client, recipe, this_round, options, widths, distil = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            (task, clients), layout = sites[site], layouts[site]
            theta, mask = layout.params(thetas[slot]), layout.mask(desk.mask, names)
            if widths is not None:
                nested = widths_of(layout.levels(desk.levels, widths[0]), widths[1])
                options = replace(options, widths=nested, distil=distil)
            update = bench.train(Job(task, clients, client, theta, mask, recipe, this_round, options))
            layout.put_kept(desk.out, update.theta, update.mask)
            if update.mask is not mask:
                layout.put_mask(desk.mask, update.mask)
            if update.report is not None:
                for name, view in layout.params(desk.report).items():
                    view.copy_(update.report[name])
            answer = (update.examples, update.train_loss, None)
        except MemoryError:
            answer = (0, 0.0, "its worker ran out of memory; use fewer workers")
        except Exception as error:
            answer = (0, 0.0, str(error) or type(error).__name__)
        pipe.send(answer)


def _die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even by kill -9: no orphans."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
