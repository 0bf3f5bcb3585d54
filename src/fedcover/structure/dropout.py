"""Dropout with an address: which units drop depends on (client, round, step, layer) and on nothing else.

``nn.Dropout`` draws from a global generator, so what a client drops would depend on the engine and on
who trains beside it. In scratch models it is replaced by this, whose bits come from a hash.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B1
FIRST, SECOND = 0x7FEB352D, 0x846CA68B
MOST_LAYERS = 1 << 20
TOP = -(2**31)
"""The sign bit: with it flipped, signed numbers compare as unsigned ones."""


def mix(x: Any) -> Any:
    """A well-mixed 32-bit number from another; works on whole numbers and on int64 tensors alike.

    >>> mix(1) == int(mix(torch.tensor(1))), mix(1) != mix(2)
    (True, True)
    """
    x = (x ^ (x >> 16)) * FIRST & LOW
    x = (x ^ (x >> 15)) * SECOND & LOW
    return x ^ (x >> 16)


def mix_int32(x: Tensor) -> Tensor:
    """The same bits as ``mix`` in int32, whose products wrap and whose shifts drag the sign along; twice as fast.

    >>> int(mix_int32(torch.tensor(5, dtype=torch.int32))) & LOW == mix(5)
    True
    """
    x = (x ^ ((x >> 16) & 0xFFFF)) * FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * (SECOND - 2**32)
    return x ^ ((x >> 16) & 0xFFFF)


class Ask(NamedTuple):
    """A dropout layer and what it drops from."""

    layer: int
    """The layer's number, and which call of it in a forward pass."""
    p: float
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stream:
    """Where the randomness of a model's dropout layers stands: whose it is, and at which step."""

    def __init__(self) -> None:
        self.key: Any = 0
        self._step: Any = 0
        self._calls: dict[int, int] = {}
        self.asked: dict[Ask, None] = {}
        """What layers have asked for since somebody emptied this."""
        self.given: Mapping[Ask, Tensor] | None = None
        """Scales that were made beforehand; then no hash is computed here."""

    def __deepcopy__(self, memo: object) -> "Stream":
        return self  # copies of a model share their stream, so that whoever trains them can set it

    @property
    def step(self) -> Any:
        """The step that is being taken; setting it begins a forward pass."""
        return self._step

    @step.setter
    def step(self, step: Any) -> None:
        self._step = step
        self._calls.clear()

    def number(self, layer: int) -> int:
        """A number for a layer's next call in this forward pass: a layer that is called twice drops differently."""
        call = self._calls.get(layer, 0)
        self._calls[layer] = call + 1
        return layer + call * MOST_LAYERS

    def scale(self, ask: Ask, device: torch.device) -> Tensor:
        """What a layer multiplies by at this step: 1 / (1 - p) where an entry stays and 0 where it drops."""
        if self.given is not None:
            return self.given[ask]
        self.asked[ask] = None
        kept = _numbers(self.key, self.step, ask, device) >= _least(ask)
        return kept.to(ask.dtype) * (1 / (1 - ask.p))


def scales(key: int, steps: Tensor, ask: Ask, device: torch.device) -> Tensor:
    """What a layer multiplies by at each of several steps."""
    # Comparing in place gives numbers 0 or 1: bool tensors take three times as long to make and to read.
    return _numbers(key, steps, ask, device).ge_(_least(ask)).to(ask.dtype).mul_(1 / (1 - ask.p))


def _numbers(key: Any, step: Any, ask: Ask, device: torch.device) -> Tensor:
    """A random int32 for each place; with a tensor of steps or keys, for each of these."""
    low, high = key & LOW, (key >> 32) & LOW
    base = mix(mix(mix(low) ^ high) + step * GOLDEN + ask.layer & LOW)
    start = torch.as_tensor(base, device=device).to(torch.int32)
    # The base is well mixed, so neighbouring places may differ by one: mix is made for such numbers.
    place = torch.arange(math.prod(ask.shape), device=device, dtype=torch.int32)
    return (mix_int32(start.unsqueeze(-1) + place) ^ TOP).view(*start.shape, *ask.shape)


def _least(ask: Ask) -> int:
    """The least number with which a place stays."""
    return int(ask.p * 2**32) + TOP


class KeyedDropout(nn.Module):
    """``nn.Dropout`` with the bits of a stream."""

    def __init__(self, p: float, layer: int, stream: Stream) -> None:
        super().__init__()
        self.p, self.layer, self.stream = p, layer, stream

    def forward(self, x: Tensor) -> Tensor:
        """Entries dropped with probability p, the rest scaled by 1 / (1 - p); nothing in evaluation."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        ask = Ask(self.stream.number(self.layer), self.p, tuple(x.shape), x.dtype)
        return x * self.stream.scale(ask, x.device)


def with_keyed_dropout(model: nn.Module) -> tuple[nn.Module, Stream]:
    """A copy of the model whose ``nn.Dropout`` layers draw from a stream, and that stream."""
    stream = Stream()
    scratch = copy.deepcopy(model)
    keyed: dict[nn.Module, KeyedDropout] = {}
    for parent in list(scratch.modules()):
        for name, child in list(parent._modules.items()):  # one layer may have several names
            if type(child) is nn.Dropout:
                setattr(parent, name, keyed.setdefault(child, KeyedDropout(child.p, len(keyed), stream)))
    return scratch, stream
