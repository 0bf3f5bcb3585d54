"""The examples from which the batches of many clients are gathered on a device."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fedcover.data import Examples, Inputs
from fedcover.data.inputs import map_inputs, parts_of
from fedcover.engines.vectorized.batch_table import BatchTable
from fedcover.seeding import seeded
from fedcover.training.client import Job, training_batch

Batch = tuple[Inputs, Tensor, Tensor]
"""Inputs, targets, and which of them are examples and not padding."""


class BatchData(Protocol):
    """Examples on a device."""

    def load(self, jobs: Sequence[Job], table: BatchTable) -> Tensor:
        """Prepare the batches of a round; return the row of the example at (step, client, position), -1 for padding."""

    def batch(self, index: Tensor) -> Batch:
        """Return the examples at these rows."""


class WholeData:
    """All examples of a data set that is the same in every epoch."""

    def __init__(self, examples: Examples, device: torch.device) -> None:
        self._examples = examples  # a reference, so that its id is not reused
        self._inputs, self._labels = examples.on_device(device).tensors()

    def load(self, jobs: Sequence[Job], table: BatchTable) -> Tensor:
        """Return the indices of the examples."""
        return table.index

    def batch(self, index: Tensor) -> Batch:
        """Return the examples at these indices."""
        return _gather(self._inputs, self._labels, index)


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


def _gather(inputs: Inputs, labels: Tensor, index: Tensor) -> Batch:
    flat = index.clamp_min(0).view(-1)

    def rows(part: Tensor) -> Tensor:
        return part.index_select(0, flat).view(*index.shape, *part.shape[1:])

    return map_inputs(rows, inputs), rows(labels), index >= 0
