"""Randomness with an address: (seed, round, purpose, client) -> generator.

Code that needs randomness uses the generator of its own address, so a draw does not depend on earlier draws or on the
process that makes it. Users' code and modules of torch draw from global generators: ``ambient`` and ``seeded`` seed
these for a block, and restore them afterwards.
"""

import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcover.errors import InputError, shown

Key = int | str
LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B1
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
TOP = -(2**31)
"""The sign bit: with it flipped, signed numbers compare as unsigned ones."""


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


def mix(x: Any) -> Any:
    """Return a 32-bit hash of a 32-bit number, for Python integers and for int64 tensors.

    >>> mix(1) == int(mix(torch.tensor(1))), mix(1) != mix(2)
    (True, True)
    """
    x = (x ^ (x >> 16)) * FIRST & LOW
    x = (x ^ (x >> 15)) * SECOND & LOW
    return x ^ (x >> 16)


def mix_int32(x: Tensor) -> Tensor:
    """Return the bits of ``mix`` in int32, twice as fast; products wrap and shifts extend the sign there.

    >>> int(mix_int32(torch.tensor(5, dtype=torch.int32))) & LOW == mix(5)
    True
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (SECOND - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


def mix_address(key: Any, step: Any, part: Any = 0) -> Any:
    """Return a 32-bit hash of a 63-bit key, a step and a part of the step, for integers and for int64 tensors."""
    low, high = key & LOW, (key >> 32) & LOW
    return mix(mix(mix(low) ^ high) + step * GOLDEN + part & LOW)


def random_numbers(keys: Sequence[int], size: int, device: torch.device, together: int = 1 << 16) -> Tensor:
    """Return random int32 numbers that are the same on every device, one row for each key; those of a row are distinct.

    Args:
        keys: Addresses, as ``Round.address`` returns them.
        size: The numbers of a row, fewer than 2^31.
        device: The device.
        together: How many numbers are best computed at once.

    >>> rows = random_numbers([address(0, "x"), address(0, "y")], 3, torch.device("cpu"))
    >>> rows.shape, len(set(rows.flatten().tolist()))
    (torch.Size([2, 3]), 6)
    """
    turned = [key >> 32 | (key & LOW) << 32 for key in keys]  # so that the two hashes of a key are not related
    hashes = torch.tensor([[mix_address(key, 0)] for key in [*keys, *turned]], device=device)
    first, second = hashes.to(torch.int32).split(len(keys))
    rows = torch.empty((len(keys), size), dtype=torch.int32, device=device)
    step = max(1, together // len(keys))
    for start in range(0, size, step):
        part = rows[:, start : start + step]
        places = torch.arange(start, start + part.shape[1], dtype=torch.int32, device=device)
        # Distinct numbers stay distinct: sums wrap, and the hash has an inverse.
        part.copy_(mix_int32((first + places) ^ second))
    return rows


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
