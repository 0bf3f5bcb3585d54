"""Clients as the batch axis of one device: all clients of a round take each step together.

Masks are data, batches are gathered on the device, and momentum and masked update are one pass. On a GPU, a
step is captured once as a CUDA graph and replayed. Results agree with ``Serial`` up to rounding, and up to
rounding a client's result does not depend on the clients that are trained with it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedcover.aggregation.base import ClientUpdate
from fedcover.data import Examples, Items
from fedcover.data.inputs import parts_of
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import failure
from fedcover.engines.vectorized.batch_data import BatchData, RoundData, WholeData
from fedcover.engines.vectorized.batch_table import BatchTable, batch_table
from fedcover.engines.vectorized.batched_step import BatchedStep, TrainedStacks
from fedcover.engines.vectorized.refusals import only_together
from fedcover.engines.vectorized.stacks import option_kinds
from fedcover.errors import InputError
from fedcover.training.client import Job
from fedcover.training.task import Task

NO_BATCHING_RULE = "There is a performance drop because we have not yet implemented the batching rule"
"""The beginning of a warning of torch."""
_Batch = tuple[Any, list[int]]
"""A key that the jobs of a batch share, and their numbers."""
_Started = tuple[list[int], Callable[[], list[ClientUpdate]]]
"""The numbers of jobs that are being trained, and a function that waits for their updates."""


class _Trained(NamedTuple):
    """The trained stacks of a batch, with each client's mean loss and whether all of its values are finite."""

    stacks: TrainedStacks
    mean_losses: Tensor
    finite: Tensor


class Vectorized(Engine):
    """An engine that trains the clients of a round as one batch, on a GPU or a CPU.

    Results agree with ``Serial`` up to rounding. A model must draw random numbers only by dropout.

    Args:
        device: The device to train on, such as ``"cuda"``; by default a GPU if there is one, else the CPU.
        compile: Whether to compile training steps; by default only on a GPU. The first round then takes longer.
        most: The largest number of clients to train at once. A larger cohort is split, as is one that does not
            fit into memory.

    >>> Vectorized("cpu")
    vectorized on cpu
    """

    name = "vectorized"
    exact = False
    trains_one_by_one = False

    def __init__(self, device: str | None = None, compile: bool | None = None, most: int = 4096) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._compile = self.device.type == "cuda" if compile is None else compile
        self._most = most
        self._data: dict[Any, WholeData] = {}
        self._batched_steps: dict[Any, BatchedStep] = {}
        self._stream: Any = None
        if self.device.type == "cuda":
            self.together, self.ahead = 16, 2
            self._stream = torch.cuda.Stream(self.device)

    def __repr__(self) -> str:
        return f"vectorized on {self.device}"

    def playing(self) -> AbstractContextManager[object]:
        """Return a context in which, on a GPU, planning and averaging take priority over the stream of training."""
        if self._stream is None:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1))

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Return an iterator over one update per job, in the order of the jobs; similar jobs are trained together.

        On a GPU the call returns as soon as the work is queued, and reading the updates waits for it.
        """
        task_keys = {key: _task_key(task) for key, task in {id(job.task): job.task for job in jobs}.items()}
        groups: dict[Any, list[int]] = {}
        for number, (job, kind) in enumerate(zip(jobs, option_kinds(jobs), strict=True)):
            groups.setdefault((kind, task_keys[id(job.task)], *_job_key(job)), []).append(number)
        batches = [
            (key, numbers[start : start + self._most])
            for key, numbers in groups.items()
            for start in range(0, len(numbers), self._most)
        ]
        return self._in_order(jobs, batches, self._start(jobs, batches, 0) if jobs else None)

    def _in_order(self, jobs: Sequence[Job], batches: list[_Batch], started: _Started | None) -> Iterator[ClientUpdate]:
        """Yield the updates in the order of the jobs; start a batch only when it is needed, to save memory."""
        done: dict[int, ClientUpdate] = {}
        for number in range(len(jobs)):
            while number not in done:
                numbers, finish = started or self._start(jobs, batches, number)
                started = None
                done |= zip(numbers, finish(), strict=True)
            yield done.pop(number)

    def _start(self, jobs: Sequence[Job], batches: list[_Batch], number: int) -> _Started:
        """Start the batch of a job. If it does not fit into memory, halve it and limit later batches to that size."""
        position = next(i for i, (_, numbers) in enumerate(batches) if number in numbers)
        key, numbers = batches.pop(position)
        while True:
            batch = [jobs[n] for n in numbers]
            try:
                return numbers, self._queue(key, batch)
            except torch.OutOfMemoryError as error:
                if len(numbers) == 1:
                    reason = f"{self.device} is out of memory for one client; use a smaller batch or engine=processes"
                    raise failure(batch[0], reason) from error
            self.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._most = -(-len(numbers) // 2)
            batches.insert(position, (key, numbers[self._most :]))
            numbers = numbers[: self._most]

    def close(self) -> None:
        """Release the memory of the device."""
        if self._stream is not None:
            self._stream.synchronize()
        self._data.clear()
        self._batched_steps.clear()

    def _queue(self, key: Any, jobs: Sequence[Job]) -> Callable[[], list[ClientUpdate]]:
        """Queue the training of a batch of jobs; return a function that waits for their updates."""
        if self._stream is None:
            return lambda: _updates(jobs, self._named_run(key, jobs))
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            trained = self._named_run(key, jobs)
            done = torch.cuda.Event()
            done.record()
        for tensor in pytree.tree_leaves(trained):
            tensor.record_stream(current)

        def finish() -> list[ClientUpdate]:
            torch.cuda.current_stream(self.device).wait_event(done)
            return _updates(jobs, trained)

        return finish

    def _named_run(self, key: Any, jobs: Sequence[Job]) -> _Trained:
        """Call ``_run``; name the first of the clients in errors, any of which may be the cause."""
        try:
            with (
                warnings.catch_warnings()
            ):  # operations without a rule for batches run client by client, which is right
                warnings.filterwarnings("ignore", NO_BATCHING_RULE)
                return self._run(key, jobs)
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if refusal := only_together(jobs[0], error):
                raise refusal from error
            others = f" (or one of the {len(jobs) - 1} trained with it)" if len(jobs) > 1 else ""
            raise failure(jobs[0], f"{str(error) or type(error).__name__}{others}") from error

    def _run(self, key: Any, jobs: Sequence[Job]) -> _Trained:
        table = batch_table(jobs, self.device)
        stacks = self._batched_step(key, jobs, table).run(jobs, table)
        counts = (table.index >= 0).sum(2) * table.last_epoch
        # Steps of clients that have finished have the loss of some other example, which may be NaN.
        means = torch.where(counts > 0, stacks.losses * counts, 0.0).sum(0) / counts.sum(0)
        values = pytree.tree_leaves((stacks.results.theta, stacks.results.moments))
        finite = torch.stack([torch.isfinite(stack).reshape(len(stack), -1).all(1) for stack in values]).all(0)
        return _Trained(stacks, means, finite)

    def _batched_step(self, key: Any, jobs: Sequence[Job], table: BatchTable) -> BatchedStep:
        """Return the cached step for a batch; one with masks also serves jobs without them."""
        masked, steps = any(job.mask for job in jobs), self._batched_steps
        kind, key = key[0], (key, len(jobs), tuple(table.index.shape), table.full)
        if key not in steps or (masked and not steps[key].masked):
            steps.pop(key, None)
            while len(steps) >= self.ahead:  # not more than needed: each has stacks of whole models
                del steps[next(iter(steps))]
            steps[key] = BatchedStep(jobs, table, masked, kind, self._data_of(jobs, table), self.device, self._compile)
        return steps[key]

    def _data_of(self, jobs: Sequence[Job], table: BatchTable) -> BatchData:
        examples = jobs[0].population.examples
        if not examples.fixed:
            return RoundData(jobs, table, self.device)
        if (key := _data_key(examples)) not in self._data:
            self._data[key] = WholeData(examples, self.device)
        return self._data[key]


def _task_key(task: Task) -> Any:
    """Return what tasks must share for their clients to be trained as one batch."""
    model = task.model
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    return (repr(model), shapes, tuple(map(_module_key, model.modules())), id(task.loss))


def _module_key(module: nn.Module) -> Any:
    """Return what a forward pass may depend on apart from parameters: type, plain attributes and buffers."""
    plain: list[Any] = []
    for name, value in [*vars(module).items(), *module._buffers.items()]:
        if isinstance(value, Tensor):
            plain.append((name, value.dtype, value.detach().cpu().numpy().tobytes()))
        elif name != "training" and isinstance(value, bool | int | float | str | tuple | list | NoneType):
            plain.append((name, repr(value)))
        elif callable(value):
            plain.append((name, id(value)))
    return type(module), tuple(plain)


def _job_key(job: Job) -> Any:
    """Return what jobs must share, apart from their tasks, to be trained as one batch.

    The step size is not part of it: a schedule changes it in every round, and a new step would have to be compiled.
    Nor is the number of steps: a client that has finished stays as it is.
    """
    return job.recipe.template, _data_key(job.population.examples)


def _data_key(examples: Examples) -> Any:
    """Return what examples must share to be gathered from one copy on a device."""
    parts = [examples.inputs] if isinstance(examples.inputs, Items) else list(parts_of(examples.inputs).values())
    return tuple(id(part) for part in (*parts, examples.labels, examples.augment))


def _updates(jobs: Sequence[Job], trained: _Trained) -> list[ClientUpdate]:
    """Return one update per client of a batch; their tensors are views of the stacks."""
    (theta, reports, moments), _, masks = trained.stacks
    losses, finite = trained.mean_losses.tolist(), trained.finite.tolist()
    return [
        ClientUpdate(
            job.client.id,
            {name: stack[i] for name, stack in theta.items()},
            {name: masks[name][i] for name in job.mask} if job.options and job.options.regrow else job.mask,
            job.population.size(job.client.id),
            loss,
            all_finite,
            report={name: stack[i] for name, stack in reports.items()} or None,
            moments={m: {name: stack[i] for name, stack in stacks.items()} for m, stacks in moments.items()} or None,
        )
        for i, (job, loss, all_finite) in enumerate(zip(jobs, losses, finite, strict=True))
    ]
