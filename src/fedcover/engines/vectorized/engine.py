"""Clients as a batch axis on one device: all of a round's clients take each step together.

Masks are data, batches are gathered on the device, momentum and the masked update are one pass. On
a GPU a step is captured once as a CUDA graph and replayed. Results agree with ``Serial`` to rounding;
each client's are the same alone or in company.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.engines.base import Engine
from fedcover.engines.client_trainer import failure
from fedcover.engines.vectorized.batch_table import batch_table
from fedcover.engines.vectorized.batched_step import BatchedStep
from fedcover.engines.vectorized.transforms import option_kinds
from fedcover.errors import InputError
from fedcover.params import Params
from fedcover.training.client import Job
from fedcover.training.task import Task

_Batch = tuple[Any, list[int]]
"""What its jobs share, and their numbers."""
_Trained = tuple[Params, Tensor, Tensor, Params, Params]
"""Stacks of parameters; each client's last loss; whether all its values are finite; stacks of reports and of masks."""
_Begun = tuple[list[int], Callable[[], list[ClientUpdate]]]
"""The numbers of jobs that are being trained, and what waits for them."""


class Vectorized(Engine):
    """Trains clients as one batch; ``device`` defaults to a GPU where there is one.

    ``most`` bounds how many clients are trained at once; a larger cohort is split, as is one that does not fit
    into memory.
    """

    name = "vectorized"
    exact = False
    trains_one_by_one = False

    def __init__(self, device: str | None = None, compile: bool | None = None, most: int = 4096) -> None:
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._compile = self.device.type == "cuda" if compile is None else compile
        self._most = most
        self._data: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor, Tensor]] = {}
        self._machines: dict[Any, BatchedStep] = {}
        self._training: Any = None
        if self.device.type == "cuda":
            self.together, self.ahead = 16, 2
            self._training = torch.cuda.Stream(self.device)

    def __repr__(self) -> str:
        return f"vectorized on {self.device}"

    def playing(self) -> AbstractContextManager[object]:
        """On a GPU: planning and averaging go before training, which has a queue of its own."""
        if self._training is None:
            return nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(self.device, priority=-1))

    def train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        """The jobs' updates in their own order; alike jobs are trained together.

        On a GPU the call returns as soon as the work is queued; who reads the updates waits for them.
        """
        kinds = {key: _kind(task) for key, task in {id(job.task): job.task for job in jobs}.items()}
        groups: dict[Any, list[int]] = {}
        for number, (job, training_options) in enumerate(zip(jobs, option_kinds(jobs), strict=True)):
            groups.setdefault((training_options, kinds[id(job.task)], *_part(job)), []).append(number)
        batches = [
            (kind, numbers[start : start + self._most])
            for kind, numbers in groups.items()
            for start in range(0, len(numbers), self._most)
        ]
        return self._in_order(jobs, batches, self._start(jobs, batches, 0) if jobs else None)

    def _in_order(self, jobs: Sequence[Job], batches: list[_Batch], begun: _Begun | None) -> Iterator[ClientUpdate]:
        """The updates by the numbers of their jobs; a batch is begun when it is needed, so that few are in memory."""
        done: dict[int, ClientUpdate] = {}
        for number in range(len(jobs)):
            while number not in done:
                numbers, finish = begun or self._start(jobs, batches, number)
                begun = None
                done |= zip(numbers, finish(), strict=True)
            yield done.pop(number)

    def _start(self, jobs: Sequence[Job], batches: list[_Batch], number: int) -> _Begun:
        """Begin the batch with this job; one that does not fit into memory is halved, and later ones are as small."""
        place = next(i for i, (_, numbers) in enumerate(batches) if number in numbers)
        kind, numbers = batches.pop(place)
        while True:
            some = [jobs[n] for n in numbers]
            try:
                return numbers, self._begin(kind, some)
            except torch.OutOfMemoryError as error:
                if len(numbers) == 1:
                    why = f"{self.device} is out of memory for one client; use a smaller batch or engine=processes"
                    raise failure(some[0], why) from error
            self.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._most = -(-len(numbers) // 2)
            batches.insert(place, (kind, numbers[self._most :]))
            numbers = numbers[: self._most]

    def close(self) -> None:
        """Give the device's memory back."""
        if self._training is not None:
            self._training.synchronize()
        self._data.clear()
        self._machines.clear()

    def _begin(self, kind: Any, jobs: Sequence[Job]) -> Callable[[], list[ClientUpdate]]:
        """Queue the training of alike jobs; what is returned waits for it."""
        if self._training is None:
            return lambda: _updates(jobs, *self._named_run(kind, jobs))
        ours = torch.cuda.current_stream(self.device)
        self._training.wait_stream(ours)
        with torch.cuda.stream(self._training):
            theta, means, finite, reports, masks = self._named_run(kind, jobs)
            done = torch.cuda.Event()
            done.record()
        for tensor in (*theta.values(), means, finite, *reports.values(), *masks.values()):
            tensor.record_stream(ours)

        def finish() -> list[ClientUpdate]:
            torch.cuda.current_stream(self.device).wait_event(done)
            return _updates(jobs, theta, means, finite, reports, masks)

        return finish

    def _named_run(self, kind: Any, jobs: Sequence[Job]) -> _Trained:
        """``_run``, whose errors name the first of the clients trained together; any of them may be the cause."""
        try:
            return self._run(kind, jobs)
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            company = f" (or one of the {len(jobs) - 1} trained with it)" if len(jobs) > 1 else ""
            raise failure(jobs[0], f"{str(error) or type(error).__name__}{company}") from error

    def _run(self, kind: Any, jobs: Sequence[Job]) -> _Trained:
        inputs, labels = self._data_of(jobs[0])
        table = batch_table(jobs, self.device)
        masked, key = any(job.mask for job in jobs), (kind, len(jobs), tuple(table.index.shape), table.full)
        if key not in self._machines or (masked and not self._machines[key].masked):
            self._machines.pop(key, None)  # one with masks serves for jobs without them too
            while len(self._machines) >= self.ahead:  # no more: each holds whole stacks of models
                del self._machines[next(iter(self._machines))]
            self._machines[key] = BatchedStep(jobs, table, masked, kind[0], inputs, labels, self.device, self._compile)
        theta, losses, reports, masks = self._machines[key].run(jobs, table)
        counts = (table.index >= 0).sum(2) * table.last_epoch
        means = (losses * counts).sum(0) / counts.sum(0)
        finite = torch.stack([torch.isfinite(s).flatten(1).all(1) for s in theta.values()]).all(0)
        return theta, means, finite, reports, masks

    def _data_of(self, job: Job) -> tuple[Tensor, Tensor]:
        inputs, labels = job.population.examples.inputs, job.population.examples.labels
        key = (id(inputs), id(labels))
        if key not in self._data:
            # The first two are kept, so that their ids stay their own.
            self._data[key] = (inputs, labels, inputs.to(self.device), labels.to(self.device))
        return self._data[key][2:]


def _kind(task: Task) -> Any:
    """What tasks must share for their clients to be trained as one batch."""
    model = task.model
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    return (repr(model), shapes, tuple(map(_look, model.modules())), id(task.loss))


def _look(module: nn.Module) -> Any:
    """What a module's forward pass may depend on beside its parameters: its type, plain attributes and buffers."""
    plain: list[Any] = []
    for name, value in [*vars(module).items(), *module._buffers.items()]:
        if isinstance(value, Tensor):
            plain.append((name, value.dtype, value.detach().cpu().numpy().tobytes()))
        elif name != "training" and isinstance(value, bool | int | float | str | tuple | list | NoneType):
            plain.append((name, repr(value)))
        elif callable(value):
            plain.append((name, id(value)))
    return type(module), tuple(plain)


def _part(job: Job) -> Any:
    """What their jobs must share beside that."""
    return job.recipe, id(job.population.examples.inputs), id(job.population.examples.labels)


def _updates(
    jobs: Sequence[Job], theta: Params, means: Tensor, finite: Tensor, reports: Params, masks: Params
) -> list[ClientUpdate]:
    """One update for each client of a batch; on a GPU its tensors are parts of the stacks."""
    return [
        ClientUpdate(
            job.client.id,
            {name: stack[i] for name, stack in theta.items()},
            {name: masks[name][i] for name in job.mask} if job.options and job.options.regrow else job.mask,
            job.population.size(job.client.id),
            mean,
            fine,
            report={name: stack[i] for name, stack in reports.items()} or None,
        )
        for i, (job, mean, fine) in enumerate(zip(jobs, means.tolist(), finite.tolist(), strict=True))
    ]
