"""A small transformer that predicts the next character at every place of a text."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError

WIDTH = 64
HEAD = 16
LAYERS = 2


class Attention(nn.Module):
    """Every place looks at itself and those before it; each head with queries, keys and values of its own."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        if width % head:
            raise InputError(f"a width of {width} cannot be cut into heads of {head}; give a multiple of {head}")
        self.heads, self.head = width // head, head
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """What each place takes from the others. The width of heads follows from the layers, which may be cut."""
        # Products by hand: fused attention cannot be batched over clients with weights of their own.
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        # By the width of the whole model's heads: a head without some of its channels is one in which they are 0.
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed: Tensor = scores.masked_fill(later, -math.inf).softmax(3) @ value
        taken: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return taken


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer on a residual stream, each after a layer norm."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head)
        self.norm2, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The stream after the block."""
        x = x + self.attention(self.norm1(x))
        stream: Tensor = x + self.back(F.gelu(self.wide(self.norm2(x))))
        return stream


class Transformer(nn.Module):
    """Two blocks of width 64 with four heads: about 110,000 parameters.

    Its units are the channels of attention heads, each the same channel of every head, and the hidden units of the
    feed-forward layers. The residual stream stays whole: a layer norm mixes all of it.
    """

    def __init__(self, shape: tuple[int, ...] = (64,), classes: int = 32, width: int = WIDTH, head: int = HEAD) -> None:
        super().__init__()
        if len(shape) != 1:
            raise InputError(f"the transformer needs rows of characters; these are {tuple(shape)}: use data 'stories'")
        self.embed = nn.Embedding(classes, width)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.blocks = nn.Sequential(*[TransformerBlock(width, head) for _ in range(LAYERS)])
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next character, of shape batch x characters x places."""
        stream = self.embed(x) + self.places[: x.shape[1]]
        scores: Tensor = self.fc(self.norm(self.blocks(stream)))
        return scores.transpose(1, 2)
