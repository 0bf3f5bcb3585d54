"""Clients as the batch axis of one device: all clients of a round take each step together.

Masks are data, batches are gathered on the device, and momentum and masked update are one pass. On a GPU, a
step is captured once as a CUDA graph and replayed. Results agree with ``Serial`` up to rounding, and up to
rounding a client's result does not depend on the clients that are trained with it.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.stacks import flat_rows, parts_of_rows
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import failure
from fedcover.engines.vectorized.batch_table import BatchTable, batch_table
from fedcover.engines.vectorized.batched_step import TrainedStacks
from fedcover.engines.vectorized.chain_step import ChainStep
from fedcover.engines.vectorized.client_indices import ClientIndices
from fedcover.engines.vectorized.launch import compile_kernels, prepare_in_background
from fedcover.engines.vectorized.layers import Arithmetic
from fedcover.engines.vectorized.lengths import FEWEST, FEWEST_ON_GPU, of_similar_length
from fedcover.engines.vectorized.precision import Precision
from fedcover.engines.vectorized.refusals import checked_device, only_together
from fedcover.engines.vectorized.side_stream import behind, urgent_stream
from fedcover.engines.vectorized.stacks import option_kinds
from fedcover.engines.vectorized.step_cache import StepCache, StepKey, data_key
from fedcover.engines.vectorized.sub_models import Part, SubModels, restored, rows_of
from fedcover.engines.vectorized.untrained import untrained_tensors
from fedcover.errors import InputError, check_whole
from fedcover.params import Params, has_room, most_entries
from fedcover.training.client import Job, with_exits_of_mask
from fedcover.training.task import Task

NO_BATCHING_RULE = "There is a performance drop because we have not yet implemented the batching rule"
"""The beginning of a warning of torch."""
MOST_GROUPS, ENOUGH_CLIENTS = 4, 512
"""The most groups of runs on a GPU, and the number of clients from which a larger group is hardly faster."""
_Started = tuple[list[int], Callable[[], list[ClientUpdate]]]
"""The numbers of jobs that are being trained, and a function that waits for their updates."""


class _Batch(NamedTuple):
    """Jobs that are trained together."""

    key: StepKey
    numbers: list[int]
    """Their numbers among all jobs."""


class _Trained(NamedTuple):
    """The trained stacks of a batch."""

    stacks: TrainedStacks
    values: Tensor | None
    """The trained parameters as one row for each client; None if their types differ."""
    numbers: Tensor
    """The mean loss of each client, and 1 if all its values are finite, else 0."""
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
        check_whole("most", most, 1)
        self.device = checked_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        compiled = self.device.type == "cuda" if compile is None else compile
        self._arithmetic = Arithmetic(self.device, Precision(precision), compiled)
        self.shrink, self.precision = shrink, precision
        self._task_keys: dict[int, tuple[Task, Any]] | None = None
        self._sub_models = SubModels()
        self._indices = ClientIndices(self.device)
        self._compiled: set[Any] = set()
        self._fewest = FEWEST if self.device.type == "cpu" else FEWEST_ON_GPU
        if self.device.type == "cuda":
            self.together, self.ahead = 16, 2
            prepare_in_background()
        self._steps = StepCache(self._arithmetic, most, self.ahead)

    def __repr__(self) -> str:
        return f"vectorized on {self.device}" + (f" in {self.precision}" if self.precision != "fp32" else "")

    def groups(self, clients: int) -> int:
        """Return more groups for many clients: a GPU then has work while several groups are planned and averaged."""
        return max(self.ahead, min(MOST_GROUPS, clients // ENOUGH_CLIENTS)) if self.ahead > 1 else 1

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Enter a context in which models do not change, apart from their parameters, and keys of tasks are kept.

        On a GPU, planning and averaging take priority in it over the streams of training.
        """
        stream, before, self._task_keys = urgent_stream(self.device), self._task_keys, {}
        try:
            with behind(stream):
                yield
        finally:
            self._task_keys = before
            if stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """Return an iterator over one update per job, in the order of the jobs; similar jobs are trained together.

        On a GPU the call returns as soon as the work is queued, and reading the updates waits for it.
        """
        jobs = [with_exits_of_mask(job) for job in jobs]
        parts = self._sub_models.of(jobs) if self.shrink else [Part(job, job) for job in jobs]
        task_keys = {} if self._task_keys is None else self._task_keys
        for job in jobs:
            if id(job.task) not in task_keys:
                task_keys[id(job.task)] = (job.task, job.task.key())  # with the task, whose id is not reused
        templates = {key: recipe.template for key, recipe in {id(job.recipe): job.recipe for job in jobs}.items()}
        groups: dict[StepKey, list[int]] = {}
        for number, (part, kind) in enumerate(zip(parts, option_kinds(jobs), strict=True)):
            job, task = part.job, task_keys[id(part.job.task)][1]
            data = data_key(job.population.examples)
            key = StepKey(kind, task, part.shape_key, templates[id(job.recipe)], data, job.exits and job.exits.template)
            groups.setdefault(key, []).append(number)
        batches = []
        for key, numbers in groups.items():
            untrained = untrained_tensors([jobs[n] for n in numbers], self._arithmetic.compiled)
            steps = [jobs[n].recipe.steps(jobs[n].examples) for n in numbers]
            for similar in of_similar_length(numbers, steps, self._fewest):
                for start in range(0, len(similar), self._steps.most):
                    batches.append(_Batch(key._replace(untrained=untrained), similar[start : start + self._steps.most]))
        self._compile_together(parts, batches)
        return self._in_order(parts, batches, self._start_together(parts, batches))

    def _compile_together(self, parts: Sequence[Part], batches: Sequence[_Batch]) -> None:
        """Compile the kernels of all new batches at once, which several threads do, and not batch by batch."""
        new = {batch.key for batch in batches} - self._compiled
        if self.device.type != "cuda" or len(new) < 2:
            return
        self._compiled |= new
        # What fails here fails again where the batch is trained, and is reported there.
        with suppress(Exception), _without_batching_warnings():
            steps = []
            for key, numbers in batches:
                jobs = [parts[n].job for n in numbers]
                table = batch_table(jobs, self._indices)
                steps.append(self._steps.of(key, lambda part=parts[numbers[0]]: part.model, jobs, table))  # type: ignore[misc]
            compile_kernels([s.try_kernels for s in steps if not isinstance(s, ChainStep) and s.has_kernels])

    def _start_together(self, parts: Sequence[Part], batches: list[_Batch]) -> list[_Started]:
        """Start the first batch, and on a GPU all others that fit into memory beside it."""
        started: list[_Started] = []
        while batches and (not started or self.device.type == "cuda"):
            if started and not has_room(self.device):
                break
            started.append(self._start(parts, batches, batches[0].numbers[0]))
        return started

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
            self._steps.most = -(-len(numbers) // 2)
            batches.insert(position, _Batch(key, numbers[self._steps.most :]))
            numbers = numbers[: self._steps.most]

    def close(self) -> None:
        """Release the memory of the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._indices.clear()
        self._steps.clear()

    def _queue(self, key: StepKey, parts: Sequence[Part]) -> Callable[[], list[ClientUpdate]]:
        """Queue the training of a batch of jobs; return a function that waits for their updates."""
        if self.device.type != "cuda":
            return lambda: _updates(parts, self._named_run(key, parts))
        trained = self._named_run(key, parts)
        current, done = torch.cuda.current_stream(self.device), torch.cuda.Event()
        done.record(self._steps.last.stream)
        for tensor in pytree.tree_leaves(trained[:3]):
            tensor.record_stream(current)

        def finish() -> list[ClientUpdate]:
            torch.cuda.current_stream(self.device).wait_event(done)
            return _updates(parts, trained)

        return finish

    def _named_run(self, key: StepKey, parts: Sequence[Part]) -> _Trained:
        """Call ``_run``; name the first of the clients in errors, any of which may be the cause."""
        jobs = [part.job for part in parts]
        try:
            with _without_batching_warnings():
                return self._run(key, lambda: parts[0].model, jobs)
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if refusal := only_together(jobs[0], error):
                raise refusal from error
            others = f" (or one of the {len(jobs) - 1} trained with it)" if len(jobs) > 1 else ""
            raise failure(jobs[0], f"{str(error) or type(error).__name__}{others}") from error

    def _run(self, key: StepKey, model: Callable[[], nn.Module], jobs: Sequence[Job]) -> _Trained:
        """Train jobs, on a GPU in the stream of their step, which is the last of ``_steps`` then."""
        table = batch_table(jobs, self._indices)
        batched_step = self._steps.of(key, model, jobs, table)
        with batched_step.queued():
            stacks = batched_step.run(jobs, table)
            counts = (table.index >= 0).sum(2) * table.last_epoch
            # Steps of clients that have finished have the loss of some other example, which may be NaN.
            means = torch.where(counts > 0, stacks.losses * counts, 0.0).sum(0) / counts.sum(0)
            flat = self._flat_rows(key, stacks.results.theta)
            values = pytree.tree_leaves((stacks.results.theta if flat is None else flat, stacks.results.moments))
            finite = torch.stack([torch.isfinite(stack).reshape(len(stack), -1).all(1) for stack in values]).all(0)
            numbers = torch.stack([means.double(), finite.double()])  # one copy to the CPU for both
        if flat is not None:  # the memory of the separate stacks is free again
            stacks = stacks._replace(results=stacks.results._replace(theta=parts_of_rows(flat, stacks.results.theta)))
        return _Trained(stacks, flat, numbers, table)

    def _flat_rows(self, key: StepKey, stacks: Params) -> Tensor | None:
        """Return trained values as one row for each client; None if they are averaged tensor by tensor.

        These are parameters of several types, and whole models that are too large to be processed at once.
        """
        large = sum(stack[0].numel() for stack in stacks.values()) > most_entries(self.device)
        return None if key.shapes is None and large else flat_rows(stacks)


@contextmanager
def _without_batching_warnings() -> Iterator[None]:
    """Ignore warnings about operations without a rule for batches: they run client by client, which is right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NO_BATCHING_RULE)
        yield


def _updates(parts: Sequence[Part], trained: _Trained) -> list[ClientUpdate]:
    """Return one update per client of a batch; their tensors are views of the stacks."""
    (theta, reports, moments), _, masks = trained.stacks
    moments = {moment: restored(parts, stacks) for moment, stacks in moments.items()}
    rows, (losses, finite) = rows_of(parts, theta, trained.values), trained.numbers.tolist()
    return [
        ClientUpdate(
            job.client.id,
            rows[i],
            {name: masks[name][i] for name in job.mask} if job.options and job.options.regrow else job.mask,
            job.population.size(job.client.id),
            loss,
            bool(all_finite),
            report={name: stack[i] for name, stack in reports.items()} or None,
            moments={m: {name: stack[i] for name, stack in stacks.items()} for m, stacks in moments.items()} or None,
        )
        for i, (job, loss, all_finite) in enumerate(zip([part.whole for part in parts], losses, finite, strict=True))
    ]
