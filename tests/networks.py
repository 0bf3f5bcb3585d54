"""Networks that several tests use."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HEAD = 12, 3, 4
TOKENS = torch.arange(8).reshape(2, 4)
ROWS = torch.randn(2, 5, WIDTH)


class Attending(nn.Module):
    """One attention layer with a projection behind it; ``split`` turns an output into heads."""

    def __init__(self, split: Callable[[Tensor], Tensor], fused: bool = False) -> None:
        super().__init__()
        self.split, self.fused = split, fused
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        else:
            self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o, self.out = nn.Linear(WIDTH, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = self.split(self.qkv(x)).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            q, k, v = (self.split(layer(x)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=HEAD**-0.5)
        scores: Tensor = self.out(self.o(mixed.transpose(1, 2).flatten(2)).mean(1))
        return scores


def heads_of_fixed_width() -> Attending:
    """Return attention whose heads have a fixed width, so that only whole heads can be removed."""
    return Attending(lambda x: x.unflatten(2, (-1, HEAD)))


def fixed_number_of_heads() -> Attending:
    """Return attention with a fixed number of heads, so that the same channel of all heads can be removed."""
    return Attending(lambda x: x.unflatten(2, (HEADS, -1)))


class Tied(nn.Module):
    """A text model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.back = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.out = nn.Linear(6, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.out(self.back(torch.relu(self.hidden(self.embed(x)))).mean(1))
        return scores
