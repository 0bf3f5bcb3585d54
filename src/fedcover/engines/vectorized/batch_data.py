"""The examples from which the batches of many clients are gathered on a device."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedcover.data import Examples, Inputs
from fedcover.data.augment import Views
from fedcover.data.inputs import map_inputs, parts_of, take
from fedcover.engines.vectorized.batch_table import BatchTable, to_device
from fedcover.seeding import seeded
from fedcover.training.client import Job, augmentation_key, check_augmented, check_views, training_batch, view_numbers

Batch = tuple[Inputs, Tensor, Tensor]
"""Inputs, targets, and which of them are examples and not padding."""


class BatchData(Protocol):
    """Examples on a device."""

    def load(self, jobs: Sequence[Job], table: BatchTable) -> Tensor:
        """Prepare the batches of a round; return the row of the example at (step, client, position), -1 for padding."""

    def batch(self, index: Tensor) -> Batch:
        """Return the examples at these rows; at a negative one, which is padding, that of row ~index."""


class WholeData:
    """All examples of a data set that is the same in every epoch."""

    def __init__(self, examples: Examples, device: torch.device) -> None:
        self._examples = examples  # a reference, so that its id is not reused
        self._inputs, self._labels = examples.on_device(device).tensors()

    @property
    def tensors(self) -> tuple[Inputs, Tensor]:
        """The inputs and the targets of all examples, on the device."""
        return self._inputs, self._labels

    def load(self, jobs: Sequence[Job], table: BatchTable) -> Tensor:
        """Return the indices of the examples."""
        return table.index

    def batch(self, index: Tensor) -> Batch:
        """Return the examples at these indices."""
        return _gather(self._inputs, self._labels, index)


class ViewedData:
    """All examples of a data set whose augmentation is a choice of views, which are gathered with each batch.

    A row of the table has the number of the example and that of its view: example * views + view.
    """

    def __init__(self, examples: Examples, augment: Views, device: torch.device) -> None:
        check_views(augment)  # before batches are gathered, which a GPU would end with an assertion
        self._examples = examples  # a reference, so that its id is not reused
        inputs, self._labels = examples.on_device(device).tensors()
        self._augment, self._source = augment, augment.source(inputs)
        first = torch.zeros(1, dtype=torch.long, device=device)
        check_augmented(take(inputs, slice(1)), self._source(first, first))

    def load(self, jobs: Sequence[Job], table: BatchTable) -> Tensor:
        """Draw the views of a round, and return the rows."""
        (steps, _, batch), device = table.index.shape, table.index.device
        keys = to_device([augmentation_key(job) for job in jobs], device).view(1, -1, 1)
        step, position = torch.arange(steps, device=device), torch.arange(batch, device=device)
        views = view_numbers(self._augment, keys, step.view(-1, 1, 1), position)
        return torch.where(table.index >= 0, table.index * self._augment.views + views, -1)

    def batch(self, index: Tensor) -> Batch:
        """Return the examples at these rows."""
        flat = _rows(index)
        example = flat // self._augment.views
        inputs = self._source(example, flat % self._augment.views)
        labels = self._labels.index_select(0, example)
        return map_inputs(lambda part: _in_batches(part, index), inputs), _in_batches(labels, index), index >= 0


class RoundData:
    """The batches of one round, read and augmented before it, one client after the other as in serial training.

    Args:
        examples: The data set.
        rows: The largest number of examples of a round, with padding.
        device: The device.
    """

    def __init__(self, examples: Examples, rows: int, device: torch.device) -> None:
        with seeded(0, "example"):
            inputs, labels = examples.read(slice(1))

        def buffer(part: Tensor) -> Tensor:
            return torch.zeros((rows, *part.shape[1:]), dtype=part.dtype, device=device)

        self._inputs, self._labels = map_inputs(buffer, inputs), buffer(labels)

    def load(self, jobs: Sequence[Job], table: BatchTable) -> Tensor:
        """Fill the rows with the batches of a round, and return their numbers."""
        index = table.index.cpu()
        numbers = torch.arange(index.numel()).view_as(index)
        for client, job in enumerate(jobs):
            for step in range(len(index)):
                real = index[step, client] >= 0
                if not bool(real.any()):
                    continue
                inputs, labels = training_batch(job, index[step, client][real], step)
                rows = numbers[step, client][real].to(self._labels.device)
                for name, part in parts_of(inputs).items():
                    buffer = parts_of(self._inputs)[name]
                    buffer[rows] = part.to(buffer)
                self._labels[rows] = labels.to(self._labels)
        return numbers.masked_fill(index < 0, -1).to(table.index.device)

    def batch(self, index: Tensor) -> Batch:
        """Return the examples at these rows."""
        return _gather(self._inputs, self._labels, index)


def resident_data(examples: Examples, device: torch.device) -> BatchData | None:
    """Return all examples on a device; None if they are read, or augmented by a function, before each round."""
    if not examples.in_memory:
        return None
    if isinstance(examples.augment, Views):
        return ViewedData(examples, examples.augment, device)
    return WholeData(examples, device) if examples.augment is None else None


def own_padding(index: Tensor) -> Tensor:
    """Return rows whose padding is ~(the first row of the same client).

    Its values do not matter, but they are computed with: those of another client could overflow under the parameters of
    this one, and 0 times infinity is NaN.

    >>> own_padding(torch.tensor([[[7, -1]], [[-1, -1]]])).tolist()
    [[[7, -8]], [[-8, -8]]]
    """
    return torch.where(index >= 0, index, ~index[0, :, :1])


def _rows(index: Tensor) -> Tensor:
    """Return the rows that are read."""
    return torch.where(index >= 0, index, ~index).view(-1)


def _gather(inputs: Inputs, labels: Tensor, index: Tensor) -> Batch:
    flat = _rows(index)

    def rows(part: Tensor) -> Tensor:
        return _in_batches(part.index_select(0, flat), index)

    return map_inputs(rows, inputs), rows(labels), index >= 0


def _in_batches(rows: Tensor, index: Tensor) -> Tensor:
    return rows.view(*index.shape, *rows.shape[1:])
