"""Dropout with an address: which units drop depends on (client, round, step, layer) and on nothing else.

``nn.Dropout`` draws from a global generator, so what a client drops would depend on the engine and on
who trains beside it. In scratch models it is replaced by this, whose bits come from a hash.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

LOW = 0xFFFFFFFF
GOLDEN = 0x9E3779B1


def mix(x: Any) -> Any:
    """A well-mixed 32-bit number from another; works on whole numbers and on int64 tensors alike.

    >>> mix(1) == int(mix(torch.tensor(1))), mix(1) != mix(2)
    (True, True)
    """
    x = (x ^ (x >> 16)) * 0x7FEB352D & LOW
    x = (x ^ (x >> 15)) * 0x846CA68B & LOW
    return x ^ (x >> 16)


class Stream:
    """Where the randomness of a model's dropout layers stands: whose it is, and at which step."""

    def __init__(self) -> None:
        self.key: Any = 0
        self.step: Any = 0

    def __deepcopy__(self, memo: object) -> "Stream":
        return self  # copies of a model share their stream, so that whoever trains them can set it

    def base(self, layer: int) -> Any:
        """The number from which a layer's bits are made at this step."""
        low, high = self.key & LOW, (self.key >> 32) & LOW
        return mix(mix(mix(low) ^ high) + self.step * GOLDEN + layer & LOW)


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
        # The base is well mixed, so neighbouring places may differ by one: mix is made for such numbers.
        place = torch.arange(x.numel(), device=x.device)
        bits = mix(place + self.stream.base(self.layer) & LOW).view(x.shape)
        kept: Tensor = bits >= int(self.p * 2**32)
        return x * (kept.to(x.dtype) / (1 - self.p))


def with_keyed_dropout(model: nn.Module) -> tuple[nn.Module, Stream]:
    """A copy of the model whose ``nn.Dropout`` layers draw from a stream, and that stream."""
    stream = Stream()
    scratch = copy.deepcopy(model)
    layer = 0
    for parent in list(scratch.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout:
                setattr(parent, name, KeyedDropout(child.p, layer, stream))
                layer += 1
    return scratch, stream
