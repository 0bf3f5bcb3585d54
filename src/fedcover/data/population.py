"""The data of the clients: views on one shared data set."""

import copy
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset

from fedcover.data.examples import Augmentation, Examples, as_examples, count_labels
from fedcover.data.inputs import join
from fedcover.data.items import Items
from fedcover.data.tensors import as_indices, as_tensor
from fedcover.errors import InputError, check_whole

Clients = TypeVar("Clients", bound="Population")


class Population:
    """Clients 0, 1, 2, ..., each with its indices into one shared set of examples.

    Only construction takes time and memory in proportion to the number of clients.

    Args:
        examples: The shared data set.
        parts: One sequence of indices for each client; clients may share examples.
        names: The names of the clients, such as user names; by default their indices.
        tests: The clients' own test sets, as a population of equally many clients.

    Raises:
        InputError: If there is no client, if a client has no examples, or if an index is out of range.

    >>> few = as_examples((torch.zeros(4, 2), [0, 1, 1, 1]))
    >>> clients = Population(few, [[0, 1], [2, 3]])
    >>> len(clients), clients.size(0), clients.label_mix(0).tolist()
    (2, 2, [0.5, 0.5])
    """

    names: tuple[str, ...] = ()
    """The names of the clients; empty if they have none."""
    tests: "Population | None" = None
    """The clients' own test sets."""
    most: float = math.inf
    """The largest weight of a client by its labels, as a multiple of an equal share; limited where they are claims."""

    def __init__(
        self,
        examples: Examples,
        parts: Iterable[object],
        names: Sequence[str] = (),
        tests: "Population | None" = None,
    ) -> None:
        if not isinstance(examples, Examples):
            kind = type(examples).__name__
            raise InputError(f"a Population needs Examples; got {kind}; use from_parts, which converts")
        tensors = [as_tensor(part, f"the part of client {client}") for client, part in enumerate(parts)]
        if not tensors:
            raise InputError("a Population needs at least one client; got none; pass one list of indices per client")
        for client, part in enumerate(tensors):
            if part.numel() == 0:
                raise InputError(f"client {client} has no examples; give it at least one, or leave the client out")
            if part.ndim != 1 or part.dtype == torch.bool or part.is_floating_point() or part.is_complex():
                as_indices(part, len(examples), f"client {client}")
        flat = torch.cat([part.to("cpu", torch.int64) for part in tensors])
        if int(flat.min()) < 0 or int(flat.max()) >= len(examples):
            for client, part in enumerate(tensors):  # only now, to name the client
                as_indices(part, len(examples), f"client {client}")
        self._examples = examples
        self._flat = flat
        self._starts = list(accumulate((len(part) for part in tensors), initial=0))
        self.names, self.tests = tuple(map(str, names)), tests
        if self.names and len(self.names) != len(self):
            raise InputError(f"there are {len(self.names)} names for {len(self)} clients; give one each")
        if tests is not None and len(tests) != len(self):
            raise InputError(f"there are {len(tests)} test sets for {len(self)} clients; give one each")

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __repr__(self) -> str:
        return f"Population({len(self)} clients, {self.total} examples of {self._examples.name})"

    @property
    def examples(self) -> Examples:
        """The shared data set."""
        return self._examples

    @property
    def total(self) -> int:
        """The number of examples that all clients have together."""
        return len(self._flat)

    def indices(self, client: int) -> Tensor:
        """Return a client's indices into the shared data set (int64, a read-only view)."""
        start, end = self._span(client)
        return self._flat[start:end]

    def size(self, client: int) -> int:
        """Return the number of examples of a client."""
        start, end = self._span(client)
        return end - start

    def counted_examples(self, client: int) -> float:
        """Return the number of examples with which a client counts among all; for devices it may be capped."""
        return self.size(client)

    def number_of(self, client: int) -> int:
        """Return the number that identifies a client to users; here its index."""
        return client

    def name_of(self, client: int) -> str:
        """Return the name of a client; by default its number."""
        return self.names[client] if self.names else str(self.number_of(client))

    def with_examples(self: Clients, examples: Examples) -> Clients:
        """Return the same clients with other examples of the same number, such as converted ones."""
        if examples is self._examples:
            return self  # engines share what they prepare for a population
        clients = copy.copy(self)
        clients._examples = examples
        return clients

    def with_tests(self: Clients, tests: "Population | None") -> Clients:
        """Return the same clients with other test sets of their own."""
        clients = copy.copy(self)
        clients.tests = tests
        return clients

    def augmented(self: Clients, augment: Augmentation | None) -> Clients:
        """Return the same clients, with inputs that a function changes in training; see ``Examples.augmented``."""
        return self.with_examples(self._examples.augmented(augment))

    def examples_of(self, client: int) -> Examples:
        """Return a client's examples: a copy, or still on disk for a lazy data set."""
        return self._examples.part(self.indices(client))

    @property
    def shares_labels(self) -> bool:
        """True if the label counts of all clients are available."""
        return self._examples.has_classes

    @property
    def parts(self) -> Tensor:
        """The partition as whole numbers, equal for equal populations."""
        return self._flat

    def label_counts(self, client: int) -> Tensor:
        """Return the number of labels of each class of a client."""
        return self._count(self.indices(client))

    def label_totals(self) -> Tensor:
        """Return the number of labels of each class of all clients together."""
        return self._count(self._flat)

    def label_mix(self, client: int) -> Tensor:
        """Return the fraction of a client's labels in each class (float64, one entry per class)."""
        counts = self.label_counts(client)
        return counts.to(torch.float64) / counts.sum()

    def classes_of(self, client: int) -> tuple[int, ...]:
        """Return the classes of which a client has examples, in ascending order."""
        return tuple(self.label_mix(client).nonzero().flatten().tolist())

    def _count(self, indices: Tensor) -> Tensor:
        labels = self._examples.class_labels()
        return count_labels(labels[indices.to(labels.device)], self._examples.classes)

    def _span(self, client: int) -> tuple[int, int]:
        if not 0 <= client < len(self):
            raise InputError(f"client must be in 0..{len(self) - 1}; got {client}; there are {len(self)} clients")
        return self._starts[client], self._starts[client + 1]


def from_parts(data: object, parts: Iterable[object] | Mapping[str, object], tests: object = None) -> Population:
    """Return clients with these parts of the data.

    Args:
        data: What ``as_examples`` takes: ``Examples``, a pair (inputs, labels), or a data set of torch or Hugging Face.
        parts: One sequence of indices for each client, or a dict from the name of each client to its indices; an index
            may occur in several.
        tests: The clients' own test sets: a pair (data, parts), with parts of the same form.

    Raises:
        InputError: If there is no client, if a client has no examples, or if an index is out of range.

    >>> from_parts((torch.zeros(3, 2), [0, 1, 0]), [[0], [1, 2]]).size(1)
    2
    >>> from_parts((torch.zeros(3, 2), [0, 1, 0]), {"ann": [0], "bo": [1, 2]}).name_of(1)
    'bo'
    """
    own_tests = None
    if tests is not None:
        if not isinstance(tests, tuple | list) or len(tests) != 2:
            raise InputError("tests must be a pair (data, parts), one part for each client")
        test_data, test_parts = tests
        if isinstance(parts, Mapping) and isinstance(test_parts, Mapping):
            if missing := [name for name in parts if name not in test_parts]:
                raise InputError(f"client '{missing[0]}' has no test set; give every client one, or none")
            test_parts = {name: test_parts[name] for name in parts}
        own_tests = from_parts(test_data, test_parts)
    if isinstance(parts, Mapping):
        return Population(as_examples(data), parts.values(), [str(name) for name in parts], own_tests)
    return Population(as_examples(data), parts, tests=own_tests)


def from_clients(datasets: Sequence[object] | Mapping[str, object]) -> Population:
    """Return clients that each have a data set of their own.

    Args:
        datasets: One data set for each client, as a sequence or as a dict by the clients' names; each is what
            ``as_examples`` takes, and all are of one kind.

    Raises:
        InputError: If there is no client, or if the data sets do not fit together.

    >>> from_clients({"ann": (torch.zeros(2, 3), [0, 1]), "bo": (torch.zeros(4, 3), [1, 1, 0, 0])}).size(1)
    4
    """
    named = isinstance(datasets, Mapping)
    parts = [as_examples(data) for data in (datasets.values() if isinstance(datasets, Mapping) else datasets)]
    if not parts:
        raise InputError("a Population needs at least one client; got none; pass one data set per client")
    ends = list(accumulate((len(part) for part in parts), initial=0))
    indices = [torch.arange(start, end) for start, end in itertools.pairwise(ends)]
    names = [str(name) for name in datasets] if named else ()
    return Population(_joined(parts), indices, names)


def _joined(parts: Sequence[Examples]) -> Examples:
    """Return the examples of several data sets as one."""
    first, classes = parts[0], max(part.classes for part in parts)
    if not all(part.in_memory for part in parts):
        sets = [part.inputs.dataset for part in parts if isinstance(part.inputs, Items)]
        if len(sets) < len(parts):
            raise InputError("some clients' data sets are in memory and others are not; pass all in one form")
        labels = [part.labels for part in parts]
        listed = torch.cat([each for each in labels if each is not None]) if None not in labels else None
        return replace(first, inputs=Items(ConcatDataset(sets)), labels=listed, classes=classes)
    try:
        inputs, targets = zip(*(part.tensors() for part in parts), strict=True)
        return replace(first, inputs=join(inputs), labels=torch.cat(targets), classes=classes)
    except (RuntimeError, KeyError, TypeError) as error:
        raise InputError(f"the clients' data sets do not fit together ({error}); give all the same form") from error


def without_small_clients(population: Population, batch_size: int, small: str = "skip") -> Population:
    """Return clients that a batch norm can train in batches of a size: no batch has a single example.

    Args:
        population: The clients.
        batch_size: The size of the batches of local training.
        small: What happens to a client with one example: ``skip`` leaves it out, ``merge`` gives its example to the
            next client. A larger client whose last batch would have one example leaves that example out.

    Raises:
        InputError: If no client remains.

    >>> clients = from_parts((torch.zeros(7, 2), [0] * 7), [[0], [1, 2], [3, 4, 5, 6]])
    >>> [without_small_clients(clients, 2, "merge").size(client) for client in range(2)]
    [2, 4]
    """
    if small not in ("skip", "merge"):
        raise InputError(f"small must be 'skip' or 'merge'; got {small!r}")
    check_whole("batch_size", batch_size, 2)
    groups: list[list[int]] = []  # the clients that become one
    waiting: list[int] = []
    for client in range(len(population)):
        group = [*waiting, client]
        waiting = group if sum(map(population.size, group)) == 1 else []
        if not waiting:
            groups.append(group)
        elif small == "skip":
            waiting = []
    if waiting and groups:
        groups[-1] += waiting
    if not groups:
        raise InputError("every client has one example; merge them, or use group norm")
    parts = [torch.cat([population.indices(client) for client in group]) for group in groups]
    parts = [part[:-1] if len(part) % batch_size == 1 else part for part in parts]
    tests = population.tests
    if tests is not None:
        merged = [torch.cat([tests.indices(client) for client in group]) for group in groups]
        tests = Population(tests.examples, merged)
    names = ["+".join(map(population.name_of, group)) for group in groups] if population.names else ()
    return Population(population.examples, parts, names, tests)
