"""A small transformer that predicts the next character at every position of a text."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError, check_whole

WIDTH = 64
HEAD = 16
LAYERS = 2


class Attention(nn.Module):
    """Causal attention: each position attends to itself and to earlier ones, in several heads."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        if width % head:
            raise InputError(f"width must be a multiple of the heads of {head}; got {width}")
        self.heads, self.head = width // head, head
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended stream; the size of the heads follows from the layers, which may be cut."""
        # Explicit products: fused attention cannot be batched over clients with different weights.
        query, key, value = (
            layer(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        # Scaled by the size of the whole model's heads: a head without some channels is one in which they are 0.
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        mixed: Tensor = scores.masked_fill(later, -math.inf).softmax(3) @ value
        attended: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return attended


class TransformerBlock(nn.Module):
    """Attention and a feed-forward layer on a residual stream, each after a layer norm."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, head)
        self.norm2, self.wide, self.back = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream after the block."""
        x = x + self.attention(self.norm1(x))
        stream: Tensor = x + self.back(F.gelu(self.wide(self.norm2(x))))
        return stream


class Transformer(nn.Module):
    """By default two blocks with a stream of 64 channels and four heads: about 110,000 parameters.

    Its units are the channels of attention heads, each the same channel of every head, and the hidden units of the
    feed-forward layers. The residual stream stays whole: a layer norm mixes all of it.

    Args:
        shape: Number of characters of an input, as a tuple of one entry.
        classes: Number of different characters.
        width: Channels of the residual stream.
        head: Channels of a head.
        layers: Number of blocks.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (64,),
        classes: int = 32,
        width: int = WIDTH,
        head: int = HEAD,
        layers: int = LAYERS,
    ) -> None:
        super().__init__()
        if len(shape) != 1:
            raise InputError(f"transformer needs rows of characters; got {tuple(shape)}; use the data set 'stories'")
        check_whole("layers", layers, 1)
        self.embed = nn.Embedding(classes, width)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.blocks = nn.Sequential(*[TransformerBlock(width, head) for _ in range(layers)])
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next character, of shape batch x characters x positions."""
        stream = self.embed(x) + self.places[: x.shape[1]]
        scores: Tensor = self.fc(self.norm(self.blocks(stream)))
        return scores.transpose(1, 2)
