"""The clients' data: views on one shared data set, however many clients there are."""

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from fedcover.data import partition
from fedcover.data.examples import Examples, as_examples, as_indices, as_tensor
from fedcover.errors import InputError


class Population:
    """Clients 0, 1, 2, ..., each with its indices into one shared set of examples.

    Only construction takes time and memory in proportion to the number of clients.

    >>> few = as_examples((torch.zeros(4, 2), [0, 1, 1, 1]))
    >>> clients = Population(few, [[0, 1], [2, 3]])
    >>> len(clients), clients.size(0), clients.label_mix(0).tolist()
    (2, 2, [0.5, 0.5])
    """

    def __init__(self, examples: Examples, parts: Iterable[object]) -> None:
        if not isinstance(examples, Examples):
            kind = type(examples).__name__
            raise InputError(f"a Population needs Examples; got {kind}; use from_parts, which converts")
        given = [as_tensor(part, f"the part of client {client}") for client, part in enumerate(parts)]
        if not given:
            raise InputError("a Population needs at least one client; got none; pass one list of indices per client")
        for client, part in enumerate(given):
            if part.numel() == 0:
                raise InputError(f"client {client} has no data; give it an example, or leave the client out")
            if part.ndim != 1 or part.dtype == torch.bool or part.is_floating_point() or part.is_complex():
                as_indices(part, len(examples), f"client {client}")
        flat = torch.cat([part.to("cpu", torch.int64) for part in given])
        if int(flat.min()) < 0 or int(flat.max()) >= len(examples):
            for client, part in enumerate(given):  # only now, to name the client
                as_indices(part, len(examples), f"client {client}")
        self._examples = examples
        self._flat = flat
        self._starts = list(accumulate((len(part) for part in given), initial=0))

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
        """A client's indices into the shared data set (int64; a view, not to be written to)."""
        start, end = self._span(client)
        return self._flat[start:end]

    def size(self, client: int) -> int:
        """The number of examples a client has."""
        start, end = self._span(client)
        return end - start

    def number_of(self, client: int) -> int:
        """The number by which people know a client; here the client itself."""
        return client

    def examples_of(self, client: int) -> Examples:
        """A client's own examples, taken from the shared data set."""
        return self._examples.subset(self.indices(client))

    @property
    def tells_labels(self) -> bool:
        """Whether it is known which labels clients have."""
        return True

    @property
    def parts(self) -> Tensor:
        """Who has what, as whole numbers: the same for equal populations."""
        return self._flat

    def label_counts(self, client: int) -> Tensor:
        """How many labels of each class a client has."""
        return self._count(self.indices(client))

    def label_totals(self) -> Tensor:
        """How many labels of each class all clients have together."""
        return self._count(self._flat)

    def label_mix(self, client: int) -> Tensor:
        """The fraction of a client's labels in each class (float64, one entry per class)."""
        counts = self.label_counts(client)
        return counts.to(torch.float64) / counts.sum()

    def classes_of(self, client: int) -> tuple[int, ...]:
        """The classes that a client has examples of, in order."""
        return tuple(self.label_mix(client).nonzero().flatten().tolist())

    def _count(self, indices: Tensor) -> Tensor:
        labels = self._examples.labels
        return torch.bincount(labels[indices.to(labels.device)].flatten(), minlength=self._examples.classes)

    def _span(self, client: int) -> tuple[int, int]:
        if not 0 <= client < len(self):
            raise InputError(f"client must be in 0..{len(self) - 1}; got {client}; there are {len(self)} clients")
        return self._starts[client], self._starts[client + 1]


def from_parts(data: object, parts: Iterable[object]) -> Population:
    """Clients with the parts given: one sequence of indices each; an index may be in several.

    >>> from_parts((torch.zeros(3, 2), [0, 1, 0]), [[0], [1, 2]]).size(1)
    2
    """
    return Population(as_examples(data), parts)


def iid(data: object, clients: int, seed: int = 0) -> Population:
    """Clients with equal random parts of the data: see ``partition.iid``.

    >>> iid((torch.zeros(6, 2), [0, 1, 0, 1, 0, 1]), clients=3).size(0)
    2
    """
    examples = as_examples(data)
    return Population(examples, partition.iid(examples.labels, clients, seed))


def shards(data: object, clients: int, shards_each: int = 2, seed: int = 0) -> Population:
    """Clients with a few shards of sorted data each, so most have few classes: see ``partition.shards``.

    >>> shards((torch.zeros(4, 2), [0, 1, 0, 1]), clients=2, shards_each=1).label_mix(0).max().item()
    1.0
    """
    examples = as_examples(data)
    return Population(examples, partition.shards(examples.labels, clients, shards_each, seed))


def dirichlet(data: object, clients: int, alpha: float = 0.5, seed: int = 0) -> Population:
    """Clients whose mix of classes is drawn from Dirichlet(alpha): see ``partition.dirichlet``.

    >>> dirichlet((torch.zeros(40, 2), [0, 1] * 20), clients=4, alpha=1.0).total
    40
    """
    examples = as_examples(data)
    return Population(examples, partition.dirichlet(examples.labels, clients, alpha, seed))
