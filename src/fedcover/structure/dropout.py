"""Dropout with an address: the units that drop depend only on (client, round, step, layer).

``nn.Dropout`` draws from a global generator, so the units that a client drops would depend on the engine and on the
other clients in the cohort. Copies of the model that are trained use ``KeyedDropout`` instead, whose bits are a hash.
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


class DropoutCall(NamedTuple):
    """One call of a dropout layer in a forward pass."""

    layer: int
    """Number of the layer and of the call, from ``Stream.number``."""
    p: float
    """Probability that an entry drops."""
    shape: tuple[int, ...]
    dtype: torch.dtype


class Stream:
    """The state of a model's dropout layers: the key of the client and round, and the step."""

    def __init__(self) -> None:
        self.key: Any = 0
        self._step: Any = 0
        self._counts: dict[int, int] = {}
        self.recorded: dict[DropoutCall, None] = {}
        """Calls of the layers since this was last cleared."""
        self.prepared: Mapping[DropoutCall, Tensor] | None = None
        """Scales drawn in advance; if set, no hash is computed."""

    def __deepcopy__(self, memo: object) -> "Stream":
        return self  # copies of a model share the stream, so that setting it affects all of them

    @property
    def step(self) -> Any:
        """The current step; setting it starts a forward pass."""
        return self._step

    @step.setter
    def step(self, step: Any) -> None:
        self._step = step
        self._counts.clear()

    def number(self, layer: int) -> int:
        """Return the number of a layer's next call in this forward pass; repeated calls drop different entries."""
        count = self._counts.get(layer, 0)
        self._counts[layer] = count + 1
        return layer + count * MOST_LAYERS

    def scale(self, call: DropoutCall, device: torch.device) -> Tensor:
        """Return the factors of a call at this step: 1 / (1 - p) for entries that stay, 0 for those that drop."""
        if self.prepared is not None:
            return self.prepared[call]
        self.recorded[call] = None
        kept = _numbers(self.key, self.step, call, device) >= _threshold(call)
        return kept.to(call.dtype) * (1 / (1 - call.p))


def scales(key: int, steps: Tensor, call: DropoutCall, device: torch.device) -> Tensor:
    """Return the factors of a call at each of several steps, stacked along the first axis."""
    # Comparing in place gives numbers 0 or 1: bool tensors take three times as long to write and to read.
    return _numbers(key, steps, call, device).ge_(_threshold(call)).to(call.dtype).mul_(1 / (1 - call.p))


def _numbers(key: Any, step: Any, call: DropoutCall, device: torch.device) -> Tensor:
    """Return a random int32 for each entry; a tensor of steps or keys adds its shape in front."""
    low, high = key & LOW, (key >> 32) & LOW
    base = mix(mix(mix(low) ^ high) + step * GOLDEN + call.layer & LOW)
    start = torch.as_tensor(base, device=device).to(torch.int32)
    # The base is well mixed, and mix separates neighbouring numbers, so entries may differ by one.
    entry = torch.arange(math.prod(call.shape), device=device, dtype=torch.int32)
    return (mix_int32(start.unsqueeze(-1) + entry) ^ TOP).view(*start.shape, *call.shape)


def _threshold(call: DropoutCall) -> int:
    """Return the smallest number with which an entry stays."""
    return int(call.p * 2**32) + TOP


class KeyedDropout(nn.Module):
    """``nn.Dropout`` with the bits of a stream."""

    def __init__(self, p: float, layer: int, stream: Stream) -> None:
        super().__init__()
        self.p, self.layer, self.stream = p, layer, stream

    def forward(self, x: Tensor) -> Tensor:
        """Drop entries with probability p and scale the others by 1 / (1 - p); in evaluation return the input."""
        if not self.training or self.p == 0:
            return x
        if self.p == 1:
            return torch.zeros_like(x)
        call = DropoutCall(self.stream.number(self.layer), self.p, tuple(x.shape), x.dtype)
        return x * self.stream.scale(call, x.device)


def with_keyed_dropout(model: nn.Module) -> tuple[nn.Module, Stream]:
    """Return a copy of the model whose ``nn.Dropout`` layers draw from a stream, and that stream."""
    stream = Stream()
    scratch = copy.deepcopy(model)
    keyed: dict[nn.Module, KeyedDropout] = {}
    for parent in list(scratch.modules()):
        for name, child in list(parent._modules.items()):  # one layer may have several names
            if type(child) is nn.Dropout:
                setattr(parent, name, keyed.setdefault(child, KeyedDropout(child.p, len(keyed), stream)))
    return scratch, stream
