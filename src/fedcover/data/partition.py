"""Ways to deal the examples of one data set to clients: pure functions of (labels, ..., seed).

Each returns one int64 tensor of indices per client, and uses every index exactly once.
"""

import math
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from fedcover.data.examples import as_labels
from fedcover.errors import InputError
from fedcover.seeding import generator

TRIES = 200


def iid(labels: object, clients: int, seed: int = 0) -> list[Tensor]:
    """A random split into parts whose sizes differ by at most one.

    >>> [len(part) for part in iid(torch.zeros(10), clients=3, seed=0)]
    [4, 3, 3]
    """
    count = len(_labels(labels))
    clients = _enough(count, _whole("clients", clients, 1), "clients")
    order = torch.randperm(count, generator=generator(_whole("seed", seed), "iid"))
    return list(order.tensor_split(clients))


def shards(labels: object, clients: int, shards_each: int = 2, seed: int = 0) -> list[Tensor]:
    """Parts of ``shards_each`` random shards: the examples in the order of their labels, cut into equal pieces.

    Where the number of shards does not divide the number of examples, the first shards have one more.

    >>> labels = torch.arange(10).repeat_interleave(6)
    >>> [len(labels[part].unique()) for part in shards(labels, clients=5, shards_each=2, seed=0)]
    [2, 2, 2, 2, 2]
    """
    y = _one_each(_labels(labels))
    clients, each = _whole("clients", clients, 1), _whole("shards_each", shards_each, 1)
    total = _enough(len(y), clients * each, "clients x shards_each")
    dealt = torch.randperm(total, generator=generator(_whole("seed", seed), "shards"))
    client_of_shard = torch.empty_like(dealt)
    client_of_shard[dealt] = torch.arange(clients).repeat_interleave(each)
    small, larger = divmod(len(y), total)
    sizes = torch.full((total,), small).index_fill_(0, torch.arange(larger), small + 1)
    owner = torch.empty_like(y)
    owner[y.argsort(stable=True)] = client_of_shard.repeat_interleave(sizes)
    return _parts(owner, clients)


def dirichlet(labels: object, clients: int, alpha: float = 0.5, seed: int = 0, least: int = 1) -> list[Tensor]:
    """Parts in which each class is dealt by proportions from Dirichlet(alpha): the smaller alpha, the less alike.

    Proportions that leave a client with fewer than ``least`` examples are drawn again, up to 200 times.

    >>> parts = dirichlet(torch.arange(10).repeat(20), clients=4, alpha=0.5, seed=0)
    >>> sum(len(part) for part in parts)
    200
    """
    y = _one_each(_labels(labels))
    clients, least, seed = _whole("clients", clients, 1), _whole("least", least, 0), _whole("seed", seed)
    if not isinstance(alpha, (int, float)) or not 0 < alpha < math.inf:
        raise InputError(f"alpha must be a positive number; got {alpha!r}; 0.5 is usual")
    _enough(len(y), clients, "clients")
    _enough(len(y), clients * least, "clients x least")
    y = torch.from_numpy(np.unique(y.numpy(), return_inverse=True)[1])  # classes without examples take no draws
    sizes = torch.bincount(y)
    for attempt in range(TRIES):
        ends = _ends(sizes, clients, alpha, generator(seed, "dirichlet", attempt))
        counts = ends.diff(dim=1, prepend=ends.new_zeros(len(sizes), 1))
        if int(counts.sum(0).min()) >= least:
            return _deal(y, counts, clients, seed)
    raise InputError(
        f"dirichlet with alpha {alpha} gave some of {clients} clients fewer than {least} of the {len(y)} examples "
        f"in each of {TRIES} draws; raise alpha, or lower clients or least"
    )


def _ends(sizes: Tensor, clients: int, alpha: float, rng: torch.Generator) -> Tensor:
    """Where each client's piece of each class ends (classes x clients), for fresh proportions.

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


def _deal(y: Tensor, counts: Tensor, clients: int, seed: int) -> list[Tensor]:
    """The parts in which client j has counts[c, j] random examples of class c."""
    shuffled = torch.randperm(len(y), generator=generator(seed, "dirichlet", "order"))
    by_class = shuffled[y[shuffled].argsort(stable=True)]
    owner = torch.empty_like(y)
    owner[by_class] = torch.arange(clients).repeat(len(counts)).repeat_interleave(counts.flatten())
    return _parts(owner, clients)


def _parts(owner: Tensor, clients: int) -> list[Tensor]:
    """Each client's indices, in rising order, from the owner of each example."""
    ends: list[int] = torch.bincount(owner, minlength=clients).cumsum(0).tolist()
    return list(owner.argsort(stable=True).tensor_split(ends[:-1]))


def _labels(labels: object) -> Tensor:
    y = as_labels(labels).cpu()
    if not len(y):
        raise InputError("labels must not be empty; pass one class number per example")
    return y


def _one_each(y: Tensor) -> Tensor:
    if y.ndim != 1:
        each = tuple(y.shape[1:])
        raise InputError(f"examples with labels of shape {each} cannot be sorted by label; use iid, or from_parts")
    return y


def _whole(what: str, value: object, least: int | None = None) -> int:
    if not isinstance(value, Integral):
        raise InputError(f"{what} must be a whole number; got {value!r}; pass an int")
    number = int(value)
    if least is not None and number < least:
        raise InputError(f"{what} must be {least} or more; got {number}; raise it")
    return number


def _enough(examples: int, wanted: int, what: str) -> int:
    if wanted > examples:
        raise InputError(f"{what} must be at most the number of examples, {examples}; got {wanted}; lower it")
    return wanted
