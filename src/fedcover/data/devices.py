"""Clients whose examples are elsewhere, on devices of their own: only what they tell of them is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from fedcover.data.examples import Examples
from fedcover.data.population import Population
from fedcover.errors import InputError, check_number, check_whole


@dataclass(frozen=True)
class Device:
    """What one client tells of itself."""

    number: int
    """The number by which it is known, whatever node it comes from."""
    examples: int
    labels: tuple[int, ...] | None = None
    """How many labels of each class it has; None if it keeps that to itself."""
    capacity: float | None = None
    """The share of the model that it can afford; None if it does not say."""

    def __post_init__(self) -> None:
        check_whole("a client's number", self.number, 0)
        check_whole("a client's number of examples", self.examples, 1)
        if self.capacity is not None:
            most = math.nextafter(1.0, 2.0)
            check_number("a client's capacity", self.capacity, 0, most, "a share of the model in (0, 1]")
        if self.labels is not None and (not self.labels or min(self.labels) < 0 or sum(self.labels) < 1):
            raise InputError(f"the labels of client {self.number} are no counts; send one count for each class")

    def check_labels(self, like: Examples) -> None:
        """Nothing, or an error if its label counts are not those of so many examples of a data set."""
        if self.labels is None:
            return
        if len(self.labels) != like.classes:
            raise InputError(
                f"client {self.number} counts labels of {len(self.labels)} classes, and there are {like.classes};"
                f" see that all have the same data set"
            )
        if sum(self.labels) != (many := self.examples * like.labels[:1].numel()):
            raise InputError(
                f"client {self.number} counts {sum(self.labels)} labels, and its {self.examples} examples have {many};"
                f" count each once"
            )


class DevicePopulation(Population):
    """Clients in the order of their numbers. ``examples`` are the server's own, for shapes and statistics alone.

    >>> few = Examples(torch.zeros(2, 3), torch.tensor([0, 1]), classes=2)
    >>> population = DevicePopulation(few, [Device(7, 4, (3, 1)), Device(2, 2, (0, 2))])
    >>> len(population), population.size(0), population.label_mix(1).tolist()
    (2, 2, [0.75, 0.25])
    >>> population.index_of(7), population.number_of(1)
    (1, 7)
    """

    def __init__(self, examples: Examples, devices: Sequence[Device]) -> None:
        if not devices:
            raise InputError("a population needs at least one client; got none; wait for clients to come")
        self._examples, self.devices = examples, tuple(sorted(devices, key=lambda one: one.number))
        self._index = {one.number: index for index, one in enumerate(self.devices)}
        if len(self._index) != len(devices):
            raise InputError("two clients of a population have the same number; give each its own")
        for one in self.devices:
            one.check_labels(examples)

    def __len__(self) -> int:
        return len(self.devices)

    def index_of(self, name: int) -> int:
        """A client's place in the population."""
        if name not in self._index:
            raise InputError(f"client {name} is not in the population; it has {', '.join(map(str, self._index))}")
        return self._index[name]

    @property
    def total(self) -> int:
        """The number of examples that all clients have together."""
        return sum(one.examples for one in self.devices)

    @property
    def tells_labels(self) -> bool:
        """Whether all clients tell their labels."""
        return all(one.labels is not None for one in self.devices)

    @property
    def parts(self) -> Tensor:
        """What the clients tell, as whole numbers."""
        told = ((one.number, one.examples, *(one.labels or ())) for one in self.devices)
        return torch.tensor(list(chain.from_iterable(told)))

    def number_of(self, client: int) -> int:
        """The number by which the client in a place is known."""
        return self.devices[client].number

    def indices(self, client: int) -> Tensor:
        """Nobody but the client knows."""
        name = self.number_of(client)
        raise InputError(f"the examples of client {name} are on its own device; train there, with engine=flower")

    def size(self, client: int) -> int:
        """The number of examples a client has."""
        return self.devices[client].examples

    def label_counts(self, client: int) -> Tensor:
        """How many labels of each class a client tells."""
        counts = self.devices[client].labels
        if counts is None:
            name = self.number_of(client)
            raise InputError(
                f"client {name} does not tell its labels, which the policy or the weighting needs; start it with"
                f" --share-labels, or choose others"
            )
        return torch.tensor(counts)

    def label_totals(self) -> Tensor:
        """How many labels of each class all clients tell together."""
        return torch.stack([self.label_counts(client) for client in range(len(self))]).sum(0)
