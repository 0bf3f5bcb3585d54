"""The steps of an engine: one that a batch of jobs fits into is used again, otherwise a new one is built."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fedcover.data import Examples, Items
from fedcover.data.augment import Views
from fedcover.data.inputs import parts_of
from fedcover.engines.vectorized.batch_data import BatchData, RoundData, resident_data
from fedcover.engines.vectorized.batch_table import BatchTable
from fedcover.engines.vectorized.batched_step import BatchedStep, StepKind
from fedcover.engines.vectorized.chain_step import ChainStep, takes, try_chain
from fedcover.engines.vectorized.layers import Arithmetic
from fedcover.engines.vectorized.prepared_model import PreparedModels
from fedcover.engines.vectorized.stacks import OptionsKind
from fedcover.params import has_room
from fedcover.training.client import Job
from fedcover.training.exits import Exits
from fedcover.training.recipes import Recipe

MOST_STEPS = 32
"""The largest number of steps that are kept, each with its buffers."""
FEW_CLIENTS = 4
"""On a GPU, a step for as many clients is used for fewer too."""
Step = BatchedStep | ChainStep


class StepKey(NamedTuple):
    """What jobs share that are trained together."""

    options: OptionsKind
    task: Any
    shapes: Any
    """The shapes of their sub-models; None for the whole model."""
    recipe: Recipe
    """Its template. The step size is not part of it: a schedule changes it in every round, and a new step would have
    to be compiled. Nor is the number of steps: a client that has finished stays as it is."""
    data: Any
    exits: Exits | None = None
    """The exits that they train, apart from the weight of distillation: clients of other depths have other steps."""
    untrained: frozenset[str] = frozenset()
    """The tensors of which none of them trains an entry."""


class StepCache:
    """The steps that an engine has built, with the data on its device.

    Args:
        arithmetic: Where and how steps are computed.
        most: The largest number of clients of a step. An engine lowers it if they do not fit into memory.
        fewest: The number of steps that are kept even if memory is short.
    """

    def __init__(self, arithmetic: Arithmetic, most: int, fewest: int) -> None:
        self.most = most
        self._arithmetic, self._fewest = arithmetic, fewest
        self._models = PreparedModels(arithmetic, MOST_STEPS)
        self._steps: list[tuple[Any, Step]] = []  # the most recently used is the last
        self._data: dict[Any, BatchData] = {}

    @property
    def steps(self) -> list[Step]:
        """The steps; the most recently used is the last."""
        return [step for _, step in self._steps]

    @property
    def last(self) -> Step:
        """The most recently used step."""
        return self._steps[-1][1]

    def of(self, key: StepKey, model: Callable[[], nn.Module], jobs: Sequence[Job], table: BatchTable) -> Step:
        """Return a step that the jobs fit into without much waste, or a new one.

        Args:
            key: What the jobs share.
            model: A function that returns their model, which is called for a new step.
            jobs: The jobs.
            table: Their batches.
        """
        steps, clients, batch_size = table.index.shape
        wanted = StepKind(key.options, any(job.mask for job in jobs), table.full, clients, steps, key.untrained)
        room = self.room_for(clients)
        fitting = [
            (k, step) for k, step in self._steps if k == (key, batch_size) and step.kind.serves(wanted, max(room))
        ]
        if not takes(jobs):
            fitting = [(k, step) for k, step in fitting if not isinstance(step, ChainStep)]
        if fitting:
            best = min(fitting, key=lambda entry: entry[1].kind.clients)
            self._steps.remove(best)
        else:
            self._make_room()
            kind = wanted._replace(clients=min(room), steps=1 << (steps - 1).bit_length())
            data = self.data_of(jobs[0].population.examples, kind.steps * kind.clients * batch_size)
            best = ((key, batch_size), self._built(key, model, jobs, table, kind, data))
        self._steps.append(best)
        return best[1]

    def _built(
        self,
        key: StepKey,
        model: Callable[[], nn.Module],
        jobs: Sequence[Job],
        table: BatchTable,
        kind: StepKind,
        data: BatchData,
    ) -> Step:
        """Return a new step: that of a chain if its kernels take the model, else one of any model."""
        if chain := try_chain(model(), jobs, kind, data, self._arithmetic):
            return chain
        prepared = self._models.of(key._replace(untrained=frozenset()), model, jobs[0], kind.full)
        return BatchedStep(prepared, jobs, table, kind, data, self._arithmetic)

    def room_for(self, clients: int) -> tuple[int, int]:
        """Return the clients for which a new step has buffers, and the most that a step may have that is used again.

        On a GPU, building a step takes longer than many rounds of it, and policies may draw other widths for clients in
        every round: there are only a few sizes.
        """
        if self._arithmetic.device.type != "cuda":
            return clients, clients
        if clients <= FEW_CLIENTS:
            padded, most = clients + clients % 2, FEW_CLIENTS
        else:
            padded = most = -(-clients // FEW_CLIENTS) * FEW_CLIENTS
        limit = max(clients, self.most)  # more may not fit into memory
        return min(padded, limit), min(most, limit)

    def data_of(self, examples: Examples, rows: int) -> BatchData:
        """Return examples on the device: all of them, or a buffer for the rows of one batch if memory is short."""
        key = data_key(examples)
        if key not in self._data and (data := resident_data(examples, self._arithmetic.device)):
            self._data[key] = data
        return self._data[key] if key in self._data else RoundData(examples, rows, self._arithmetic.device)

    def clear(self) -> None:
        """Drop all steps, models and data."""
        self._data.clear()
        self._steps.clear()
        self._models.clear()

    def _make_room(self) -> None:
        """Drop the steps that were used least recently: each has stacks of whole models."""
        device = self._arithmetic.device
        while len(self._steps) >= (MOST_STEPS if has_room(device) else self._fewest):
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # their buffers may be in use
            del self._steps[0]


def data_key(examples: Examples) -> Any:
    """Return what examples must share to be gathered from one copy on a device."""
    inputs, augment = examples.inputs, examples.augment
    parts = {"": inputs} if isinstance(inputs, Items) else parts_of(inputs)
    of_augment = augment if isinstance(augment, Views) else id(augment)
    return type(inputs), tuple((name, id(part)) for name, part in parts.items()), id(examples.labels), of_augment
