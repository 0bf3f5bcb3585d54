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
from fedcover.engines.vectorized.batched_step import BatchedStep, StepKind, TrainedStacks
from fedcover.engines.vectorized.layers import Arithmetic
from fedcover.engines.vectorized.precision import Precision
from fedcover.engines.vectorized.refusals import only_together
from fedcover.engines.vectorized.stacks import option_kinds
from fedcover.engines.vectorized.sub_models import Part, SubModels, restored
from fedcover.errors import InputError
from fedcover.training.client import Job
from fedcover.training.task import Task

NO_BATCHING_RULE = "There is a performance drop because we have not yet implemented the batching rule"
"""The beginning of a warning of torch."""
MOST_STEPS = 32
"""The largest number of steps that are kept, each with its buffers."""
_Started = tuple[list[int], Callable[[], list[ClientUpdate]]]
"""The numbers of jobs that are being trained, and a function that waits for their updates."""


class _Batch(NamedTuple):
    """Jobs that are trained together."""

    key: Any
    """What they share."""
    numbers: list[int]
    """Their numbers among all jobs."""


class _Trained(NamedTuple):
    """The trained stacks of a batch, with each client's mean loss and whether all of its values are finite."""

    stacks: TrainedStacks
    mean_losses: Tensor
    finite: Tensor
    table: BatchTable
    """The batches, whose memory is in use until training has ended."""


class Vectorized(Engine):
    """An engine that trains the clients of a round as one batch, on a GPU or a CPU.

    Results agree with ``Serial`` up to rounding. A model must draw random numbers only by dropout.

    Args:
        device: The device to train on, such as ``"cuda"``; by default a GPU if there is one, else the CPU.
        compile: Whether steps may be compiled; by default only on a GPU. The first round then takes longer.
        most: The largest number of clients to train at once. A larger cohort is split, as is one that does not
            fit into memory.
        shrink: Whether to train physically smaller sub-models where masks remove whole units of a model that is large
            enough to gain from it. Sub-models of different shapes are trained side by side.
        precision: ``fp32``, ``tf32`` or ``bf16``: how forward and backward passes compute. Parameters, momenta and
            averages are float32.

    >>> Vectorized("cpu")
    vectorized on cpu
    """

    name = "vectorized"
    exact = False
    trains_one_by_one = False

    def __init__(
        self,
        device: str | None = None,
        compile: bool | None = None,
        most: int = 4096,
        shrink: bool = True,
        precision: str = "fp32",
    ) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        compiled = self.device.type == "cuda" if compile is None else compile
        self._arithmetic = Arithmetic(self.device, Precision(precision), compiled)
        self.shrink, self.precision = shrink, precision
        self._most = most
        self._sub_models = SubModels()
        self._data: dict[Any, WholeData] = {}
        self._steps: list[tuple[Any, BatchedStep]] = []  # the most recently used is the last
        if self.device.type == "cuda":
            self.together, self.ahead = 16, 2

    def __repr__(self) -> str:
        return f"vectorized on {self.device}" + (f" in {self.precision}" if self.precision != "fp32" else "")

    def playing(self) -> AbstractContextManager[object]:
        """Return a context in which, on a GPU, planning and averaging take priority over the streams of training."""
        if self.device.type != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1))

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Return an iterator over one update per job, in the order of the jobs; similar jobs are trained together.

        On a GPU the call returns as soon as the work is queued, and reading the updates waits for it.
        """
        parts = self._sub_models.of(jobs) if self.shrink else [Part(job, job) for job in jobs]
        task_keys = {key: _task_key(task) for key, task in {id(job.task): job.task for job in jobs}.items()}
        groups: dict[Any, list[int]] = {}
        for number, (part, kind) in enumerate(zip(parts, option_kinds(jobs), strict=True)):
            key = (kind, task_keys[id(part.job.task)], part.shape_key, *_job_key(part.job))
            groups.setdefault(key, []).append(number)
        batches = [
            _Batch(key, numbers[start : start + self._most])
            for key, numbers in groups.items()
            for start in range(0, len(numbers), self._most)
        ]
        return self._in_order(parts, batches, self._start_together(parts, batches))

    def _start_together(self, parts: Sequence[Part], batches: list[_Batch]) -> list[_Started]:
        """Start the first batch, and on a GPU all others that fit into memory beside it."""
        started: list[_Started] = []
        while batches and (not started or self.device.type == "cuda"):
            if started and not self._has_room():
                break
            started.append(self._start(parts, batches, batches[0].numbers[0]))
        return started

    def _has_room(self) -> bool:
        """Return whether a GPU has half of its memory free, or in torch's hands but unused."""
        if self.device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device) > total // 2

    def _in_order(
        self, parts: Sequence[Part], batches: list[_Batch], started: list[_Started]
    ) -> Iterator[ClientUpdate]:
        """Yield the updates in the order of the jobs; start a further batch only when it is needed, to save memory."""
        done: dict[int, ClientUpdate] = {}
        for number in range(len(parts)):
            while number not in done:
                if not started:
                    started.append(self._start(parts, batches, number))
                numbers, finish = started.pop(0)
                done |= zip(numbers, finish(), strict=True)
            yield done.pop(number)

    def _start(self, parts: Sequence[Part], batches: list[_Batch], number: int) -> _Started:
        """Start the batch of a job. If it does not fit into memory, halve it and limit later batches to that size."""
        position = next(i for i, batch in enumerate(batches) if number in batch.numbers)
        batch = batches.pop(position)
        key, numbers = batch.key, batch.numbers
        while True:
            some = [parts[n] for n in numbers]
            try:
                return numbers, self._queue(key, some)
            except torch.OutOfMemoryError as error:
                if len(numbers) == 1:
                    reason = f"{self.device} is out of memory for one client; use a smaller batch or engine=processes"
                    raise failure(some[0].job, reason) from error
            self.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._most = -(-len(numbers) // 2)
            batches.insert(position, _Batch(key, numbers[self._most :]))
            numbers = numbers[: self._most]

    def close(self) -> None:
        """Release the memory of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._data.clear()
        self._steps.clear()

    def _queue(self, key: Any, parts: Sequence[Part]) -> Callable[[], list[ClientUpdate]]:
        """Queue the training of a batch of jobs; return a function that waits for their updates."""
        if self.device.type != "cuda":
            return lambda: _updates(parts, self._named_run(key, parts))
        trained = self._named_run(key, parts)
        current, done = torch.cuda.current_stream(self.device), torch.cuda.Event()
        done.record(self._steps[-1][1].stream)
        for tensor in pytree.tree_leaves(trained[:3]):
            tensor.record_stream(current)

        def finish() -> list[ClientUpdate]:
            torch.cuda.current_stream(self.device).wait_event(done)
            return _updates(parts, trained)

        return finish

    def _named_run(self, key: Any, parts: Sequence[Part]) -> _Trained:
        """Call ``_run``; name the first of the clients in errors, any of which may be the cause."""
        jobs = [part.job for part in parts]
        try:
            with warnings.catch_warnings():
                # Operations without a rule for batches run client by client, which is right.
                warnings.filterwarnings("ignore", NO_BATCHING_RULE)
                return self._run(key, lambda: parts[0].model, jobs)
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if refusal := only_together(jobs[0], error):
                raise refusal from error
            others = f" (or one of the {len(jobs) - 1} trained with it)" if len(jobs) > 1 else ""
            raise failure(jobs[0], f"{str(error) or type(error).__name__}{others}") from error

    def _run(self, key: Any, model: Callable[[], nn.Module], jobs: Sequence[Job]) -> _Trained:
        """Train jobs, on a GPU in the stream of their step, which is the last of ``_steps`` then."""
        table = batch_table(jobs, self.device)
        batched_step = self._batched_step(key, model, jobs, table)
        with batched_step.queued():
            stacks = batched_step.run(jobs, table)
            counts = (table.index >= 0).sum(2) * table.last_epoch
            # Steps of clients that have finished have the loss of some other example, which may be NaN.
            means = torch.where(counts > 0, stacks.losses * counts, 0.0).sum(0) / counts.sum(0)
            values = pytree.tree_leaves((stacks.results.theta, stacks.results.moments))
            finite = torch.stack([torch.isfinite(stack).reshape(len(stack), -1).all(1) for stack in values]).all(0)
        return _Trained(stacks, means, finite, table)

    def _batched_step(
        self, key: Any, model: Callable[[], nn.Module], jobs: Sequence[Job], table: BatchTable
    ) -> BatchedStep:
        """Return a cached step that the jobs fit into without much waste, or a new one."""
        steps, clients, batch_size = table.index.shape
        wanted = StepKind(key[0], any(job.mask for job in jobs), table.full, clients, steps)
        key = (key, batch_size)
        fitting = [(k, step) for k, step in self._steps if k == key and step.kind.serves(wanted)]
        if fitting:
            best = min(fitting, key=lambda entry: entry[1].kind.clients)
            self._steps.remove(best)
        else:
            self._make_room()
            kind = wanted._replace(steps=1 << (steps - 1).bit_length())
            data = self._data_of(jobs[0].population.examples, kind.steps * clients * batch_size)
            best = (key, BatchedStep(model(), jobs, table, kind, data, self._arithmetic))
        self._steps.append(best)
        return best[1]

    def _make_room(self) -> None:
        """Drop the steps that were used least recently: each has stacks of whole models."""
        while len(self._steps) >= (MOST_STEPS if self._has_room() else self.ahead):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # their buffers may be in use
            del self._steps[0]

    def _data_of(self, examples: Examples, rows: int) -> BatchData:
        if not examples.fixed:
            return RoundData(examples, rows, self.device)
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


def _updates(parts: Sequence[Part], trained: _Trained) -> list[ClientUpdate]:
    """Return one update per client of a batch; their tensors are views of the stacks."""
    (theta, reports, moments), _, masks = trained.stacks
    theta, moments = restored(parts, theta), {moment: restored(parts, stacks) for moment, stacks in moments.items()}
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
        for i, (job, loss, all_finite) in enumerate(zip([part.whole for part in parts], losses, finite, strict=True))
    ]
