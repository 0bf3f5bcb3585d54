"""Clients whose examples are on their own devices, described only by the metadata that they share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

import torch
from torch import Tensor

from fedcover.data.examples import Examples
from fedcover.data.population import Population
from fedcover.errors import InputError, check_number, check_whole


@dataclass(frozen=True)
class Device:
    """The metadata that one client shares.

    Args:
        number: Number that identifies the client, on whichever node it runs.
        examples: Number of its training examples.
        labels: Number of its labels of each class; None if it does not share them.
        capacity: Fraction of the model that it can afford, in (0, 1]; None if it does not declare one.

    Raises:
        InputError: If a value is out of range.

    >>> Device(7, examples=4, labels=(3, 1)).labels
    (3, 1)
    """

    number: int
    examples: int
    labels: tuple[int, ...] | None = None
    capacity: float | None = None

    def __post_init__(self) -> None:
        check_whole("a client's number", self.number, 0)
        check_whole("a client's number of examples", self.examples, 1)
        if self.capacity is not None:
            most = math.nextafter(1.0, 2.0)
            check_number("a client's capacity", self.capacity, 0, most, "a share of the model in (0, 1]")
        if self.labels is not None and (not self.labels or min(self.labels) < 0 or sum(self.labels) < 1):
            raise InputError(f"the labels of client {self.number} are not counts; send one count for each class")

    def check_labels(self, like: Examples) -> None:
        """Raise InputError unless the label counts fit the classes of a data set and the number of examples."""
        if self.labels is None:
            return
        if len(self.labels) != like.classes:
            raise InputError(
                f"client {self.number} counts labels of {len(self.labels)} classes, but there are {like.classes};"
                f" use the same data set on all nodes"
            )
        if sum(self.labels) != (expected := self.examples * like.class_labels()[:1].numel()):
            raise InputError(
                f"client {self.number} counts {sum(self.labels)} labels, but its {self.examples} examples have"
                f" {expected}; count each label once"
            )


class DevicePopulation(Population):
    """Clients on their own devices, in the order of their numbers.

    Args:
        examples: Examples of the server, used only for shapes and statistics.
        devices: The clients; their numbers must differ.
        most: The largest number of examples with which a client counts among all, as a multiple of the median, and its
            largest weight by labels, as a multiple of an equal share: a device may claim any number and any labels.

    Raises:
        InputError: If there is no device, if two have the same number, or if label counts do not fit ``examples``.

    >>> few = Examples(torch.zeros(2, 3), torch.tensor([0, 1]), classes=2)
    >>> population = DevicePopulation(few, [Device(7, 4, (3, 1)), Device(2, 2, (0, 2))])
    >>> len(population), population.size(0), population.label_mix(1).tolist()
    (2, 2, [0.75, 0.25])
    >>> population.index_of(7), population.number_of(1)
    (1, 7)
    """

    def __init__(self, examples: Examples, devices: Sequence[Device], most: float = math.inf) -> None:
        if not devices:
            raise InputError("a population needs at least one client; got none; wait until a client has connected")
        self._examples, self.devices = examples, tuple(sorted(devices, key=lambda device: device.number))
        self._index = {device.number: index for index, device in enumerate(self.devices)}
        if len(self._index) != len(devices):
            raise InputError("two clients of a population have the same number; give each its own")
        for device in self.devices:
            device.check_labels(examples)
        self.most, self._most_examples = most, most * median(device.examples for device in devices)

    def __len__(self) -> int:
        return len(self.devices)

    def index_of(self, number: int) -> int:
        """Return the index of the client with a number; raise InputError if there is none."""
        if number not in self._index:
            raise InputError(f"client {number} is not in the population; it has {', '.join(map(str, self._index))}")
        return self._index[number]

    @property
    def total(self) -> int:
        """The number of examples that all clients have together."""
        return sum(device.examples for device in self.devices)

    @property
    def shares_labels(self) -> bool:
        """True if all clients share their label counts."""
        return all(device.labels is not None for device in self.devices)

    @property
    def parts(self) -> Tensor:
        """The metadata of all clients as whole numbers, equal for equal populations."""
        rows = ((device.number, device.examples, *(device.labels or ())) for device in self.devices)
        return torch.tensor(list(chain.from_iterable(rows)))

    def number_of(self, client: int) -> int:
        """Return the number of the client at an index."""
        return self.devices[client].number

    def indices(self, client: int) -> Tensor:
        """Raise InputError: only the device has the examples of a client."""
        number = self.number_of(client)
        raise InputError(
            f"the examples of client {number} are on its own device; train there, with `fedcover deploy run`"
        )

    def size(self, client: int) -> int:
        """Return the number of examples of a client."""
        return self.devices[client].examples

    def counted_examples(self, client: int) -> float:
        """Return the number of examples with which a client counts among all: what it claims, up to the limit."""
        return min(self.size(client), self._most_examples)

    def label_counts(self, client: int) -> Tensor:
        """Return the number of labels of each class of a client; raise InputError if it does not share them."""
        counts = self.devices[client].labels
        if counts is None:
            raise InputError(
                f"client {self.number_of(client)} does not share its labels, which the policy or the weighting needs;"
                f" start it with --share-labels, or choose another policy or weighting"
            )
        return torch.tensor(counts)

    def label_totals(self) -> Tensor:
        """Return the number of labels of each class of all clients together."""
        counts = (self.label_counts(client) for client in range(len(self)))
        shares = [self.counted_examples(client) / self.size(client) for client in range(len(self))]
        return torch.stack(
            [count if share == 1 else (share * count).long() for count, share in zip(counts, shares, strict=True)]
        ).sum(0)
