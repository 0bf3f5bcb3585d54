"""Ways to deal the examples of one data set to clients: IID, by shards of sorted labels, by Dirichlet proportions.

Each is a pure function of the labels, its options and the seed, and gives every example to exactly one client.
"""

import math
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from fedcover.data.examples import as_examples
from fedcover.data.population import Population
from fedcover.errors import InputError
from fedcover.seeding import generator

TRIES = 200


def iid(data: object, clients: int, seed: int = 0) -> Population:
    """Return clients with equal random parts of the data; their sizes differ by at most one.

    Args:
        data: ``Examples``, a pair (inputs, labels), or a torch dataset of (x, y) pairs.
        clients: Number of clients, at most the number of examples.
        seed: Seed of the draw.

    Raises:
        InputError: If there are more clients than examples, or if an argument is not valid.

    >>> [iid((torch.zeros(10, 2), torch.zeros(10).long()), clients=3).size(client) for client in range(3)]
    [4, 3, 3]
    """
    examples = as_examples(data)
    count = _whole("clients", clients, 1)
    _check_enough(len(examples), count, "clients")
    order = torch.randperm(len(examples), generator=generator(_whole("seed", seed), "iid"))
    return Population(examples, order.tensor_split(count))


def shards(data: object, clients: int, shards_each: int = 2, seed: int = 0) -> Population:
    """Return clients with a few shards each of the data sorted by label, so that most clients have few classes.

    The examples, in the order of their labels, are cut into clients x shards_each equal pieces, which are dealt at
    random. Where the number of shards does not divide the number of examples, the first shards have one more.

    Args:
        data: ``Examples``, a pair (inputs, labels), or a torch dataset of (x, y) pairs, with one label per example.
        clients: Number of clients.
        shards_each: Number of shards of each client.
        seed: Seed of the draw.

    Raises:
        InputError: If there are more shards than examples, or if an argument is not valid.

    >>> population = shards((torch.zeros(60, 2), torch.arange(10).repeat_interleave(6)), clients=5)
    >>> [len(population.classes_of(client)) for client in range(5)]
    [2, 2, 2, 2, 2]
    """
    examples = as_examples(data)
    labels = _one_each(examples.class_labels())
    count, each = _whole("clients", clients, 1), _whole("shards_each", shards_each, 1)
    total = count * each
    _check_enough(len(labels), total, "clients x shards_each")
    dealt = torch.randperm(total, generator=generator(_whole("seed", seed), "shards"))
    client_of_shard = torch.empty_like(dealt)
    client_of_shard[dealt] = torch.arange(count).repeat_interleave(each)
    small, larger = divmod(len(labels), total)
    sizes = torch.full((total,), small).index_fill_(0, torch.arange(larger), small + 1)
    owner = torch.empty_like(labels)
    owner[labels.argsort(stable=True)] = client_of_shard.repeat_interleave(sizes)
    return Population(examples, _parts(owner, count))


def dirichlet(data: object, clients: int, alpha: float = 0.5, seed: int = 0, least: int = 1) -> Population:
    """Return clients whose shares of each class are drawn from Dirichlet(alpha).

    Proportions that leave a client with fewer than ``least`` examples are drawn again, up to 200 times.

    Args:
        data: ``Examples``, a pair (inputs, labels), or a torch dataset of (x, y) pairs, with one label per example.
        clients: Number of clients.
        alpha: Concentration; the smaller it is, the more the clients differ.
        seed: Seed of the draw.
        least: Smallest number of examples of a client.

    Raises:
        InputError: If no draw gives every client ``least`` examples, or if an argument is not valid.

    >>> dirichlet((torch.zeros(40, 2), [0, 1] * 20), clients=4, alpha=1.0).total
    40
    """
    examples = as_examples(data)
    labels = _one_each(examples.class_labels())
    count, least, seed = _whole("clients", clients, 1), _whole("least", least, 0), _whole("seed", seed)
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise InputError(f"alpha must be a positive number; got {alpha!r}; 0.5 is usual")
    _check_enough(len(labels), count, "clients")
    _check_enough(len(labels), count * least, "clients x least")
    present = torch.from_numpy(np.unique(labels.numpy(), return_inverse=True)[1])  # classes without examples: no draws
    sizes = torch.bincount(present)
    for attempt in range(TRIES):
        ends = _ends(sizes, count, alpha, generator(seed, "dirichlet", attempt))
        counts = ends.diff(dim=1, prepend=ends.new_zeros(len(sizes), 1))
        if int(counts.sum(0).min()) >= least:
            return Population(examples, _deal(present, counts, count, seed))
    raise InputError(
        f"dirichlet with alpha {alpha} gave some of {count} clients fewer than {least} of the {len(labels)} examples "
        f"in each of {TRIES} draws; raise alpha, or lower clients or least"
    )


def _ends(sizes: Tensor, clients: int, alpha: float, rng: torch.Generator) -> Tensor:
    """Return the end of each client's piece of each class (classes x clients), for newly drawn proportions.

    Proportions are normalised Gamma(alpha) draws, taken in logarithms as
    log Gamma(alpha) = log Gamma(alpha + 1) + log(U) / alpha, so that a tiny alpha does not underflow.
    """
    shape = torch.full((len(sizes), clients), float(alpha) + 1.0, dtype=torch.float64)
    uniform = 1.0 - torch.rand(shape.shape, dtype=torch.float64, generator=rng)
    log_gamma = torch._standard_gamma(shape, generator=rng).log() + uniform.log() / alpha
    ends = (log_gamma.softmax(1).cumsum(1) * sizes[:, None]).round().to(torch.int64)
    ends = torch.minimum(ends, sizes[:, None])
    ends[:, -1] = sizes
    return ends


def _deal(labels: Tensor, counts: Tensor, clients: int, seed: int) -> list[Tensor]:
    """Return the parts in which client j has counts[c, j] random examples of class c."""
    shuffled = torch.randperm(len(labels), generator=generator(seed, "dirichlet", "order"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    owner = torch.empty_like(labels)
    owner[by_class] = torch.arange(clients).repeat(len(counts)).repeat_interleave(counts.flatten())
    return _parts(owner, clients)


def _parts(owner: Tensor, clients: int) -> list[Tensor]:
    """Return each client's indices, in ascending order, from the owner of each example."""
    ends: list[int] = torch.bincount(owner, minlength=clients).cumsum(0).tolist()
    return list(owner.argsort(stable=True).tensor_split(ends[:-1]))


def _one_each(labels: Tensor) -> Tensor:
    """Return labels on the CPU; raise InputError unless there is one for each example."""
    if labels.ndim != 1:
        each = tuple(labels.shape[1:])
        raise InputError(f"examples with labels of shape {each} cannot be sorted by label; use iid or from_parts")
    return labels.cpu()


def _whole(name: str, value: object, least: int | None = None) -> int:
    if not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number; got {value!r}; pass an int")
    number = int(value)
    if least is not None and number < least:
        raise InputError(f"{name} must be {least} or more; got {number}; raise it")
    return number


def _check_enough(examples: int, needed: int, name: str) -> None:
    if needed > examples:
        raise InputError(f"{name} must be at most the number of examples, {examples}; got {needed}; lower it")
