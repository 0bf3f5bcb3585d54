"""Randomness with an address: (seed, round, purpose, client) -> generator.

Code that needs randomness uses the generator of its own address, so a draw does not depend on earlier draws or on the
process that makes it. Users' code and modules of torch draw from global generators: ``ambient`` and ``seeded`` seed
these for a block, and restore them afterwards.
"""

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from fedcover.errors import InputError, shown

Key = int | str


def address(seed: int, *key: Key) -> int:
    """Return the 63-bit number of an address; equal keys give equal numbers on every machine.

    Args:
        seed: Seed of the federation.
        key: Parts of the address. The type of a part counts: ``1`` and ``"1"`` are different.

    Raises:
        InputError: If the seed is not a whole number.

    >>> address(0, "cohort", 3) == address(0, "cohort", 3) != address(1, "cohort", 3)
    True
    """
    text = "/".join(f"{type(part).__name__}:{part}" for part in (whole_seed(seed), *key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def whole_seed(seed: object) -> int:
    """Return a seed as an int, also if it is a whole number of numpy; raise InputError otherwise.

    >>> whole_seed(np.int64(3))
    3
    """
    try:
        return operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"seed must be a whole number; got {shown(seed)}") from None


def generator(seed: int, *key: Key) -> torch.Generator:
    """Return a new CPU generator for one address.

    >>> a, b = generator(0, "x"), generator(0, "x")
    >>> torch.equal(torch.rand(3, generator=a), torch.rand(3, generator=b))
    True
    """
    return torch.Generator().manual_seed(address(seed, *key))


@contextmanager
def ambient(seed: int, *key: Key) -> Iterator[None]:
    """Seed torch's default CPU generator by an address inside the block, and restore its state afterwards.

    Modules such as ``nn.Dropout`` and the default initialisers do not accept a generator, so they draw from this one.
    """
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(address(seed, *key))
    try:
        yield
    finally:
        torch.default_generator.set_state(before)


@contextmanager
def seeded(seed: int, *key: Key) -> Iterator[None]:
    """Seed the generators of torch, numpy and Python by an address inside the block, and restore them afterwards.

    Users' code, such as the ``__getitem__`` of a data set, may draw from any of them.
    """
    number = address(seed, *key)
    before = random.getstate(), np.random.get_state()
    random.seed(number)
    np.random.seed(number % 2**32)
    try:
        with ambient(seed, *key):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def generator_states() -> tuple[object, ...]:
    """Return the states of Python's and numpy's generators; they can be compared.

    >>> before = generator_states()
    >>> _ = random.random()
    >>> generator_states() == before
    False
    """
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, keys.tobytes() if isinstance(keys, np.ndarray) else keys, *rest


@dataclass(frozen=True)
class Round:
    """One round of a federation, and the source of all randomness in it.

    Args:
        index: Number of the round, from 1, as the paper's q.
        seed: Seed of the federation.

    >>> Round(index=1, seed=0).generator("mask", 7).initial_seed() == Round(1, 0).generator("mask", 7).initial_seed()
    True
    """

    index: int
    seed: int

    def address(self, *key: Key) -> int:
        """Return the 63-bit number of an address in this round."""
        return address(self.seed, "round", self.index, *key)

    def generator(self, *key: Key) -> torch.Generator:
        """Return the generator for one purpose in this round, such as ``generator("mask", client.id)``."""
        return generator(self.seed, "round", self.index, *key)
