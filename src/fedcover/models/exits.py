"""ResNet-18 and the transformer with exits: a classifier after each stage, or after each block."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError, check_whole
from fedcover.models.resnet import STAGES, ResidualBlock, norm_layer
from fedcover.models.transformer import HEAD, WIDTH, TransformerBlock
from fedcover.structure.exits import ExitModel

BLOCKS_PER_STAGE = 2
LAYERS = 6


class ResNet18Exits(ExitModel):
    """ResNet-18 with four exits, one after each stage of two blocks.

    An exit is a linear layer behind the mean over the image. Those of DepthFL and ScaleFL also have convolutions.

    Args:
        shape: Shape of one image.
        classes: Number of classes.
        norm: ``batch`` or ``group``.
    """

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: str = "batch") -> None:
        if len(shape) != 3:
            raise InputError(
                f"resnet18_exits needs images, channels x height x width; got {tuple(shape)}; use the mlp instead"
            )
        if norm not in ("batch", "group"):
            raise InputError(f"norm must be 'batch' or 'group'; got '{norm}'")
        super().__init__(depth=len(STAGES) // BLOCKS_PER_STAGE)
        self.conv = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        self.norm = norm_layer(norm, 64)
        widths = [64, *(outputs for outputs, _ in STAGES)]
        blocks = [ResidualBlock(widths[i], outputs, stride, norm) for i, (outputs, stride) in enumerate(STAGES)]
        starts = range(0, len(blocks), BLOCKS_PER_STAGE)
        self.layers = nn.ModuleList([nn.Sequential(*blocks[at : at + BLOCKS_PER_STAGE]) for at in starts])
        self.heads = nn.ModuleList([nn.Linear(widths[at + BLOCKS_PER_STAGE], classes) for at in starts])

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the images after each stage."""
        x = F.relu(self.norm(self.conv(x)))
        for layer in self.layers:
            x = layer(x)
            yield x

    def score(self, number: int, features: Tensor) -> Tensor:
        """Return the class scores of an exit."""
        scores: Tensor = self.heads[number - 1](features.mean((2, 3)))
        return scores


class TransformerExits(ExitModel):
    """The transformer with an exit after each block: a layer norm and a linear layer.

    Args:
        shape: Number of characters of an input, as a tuple of one entry.
        classes: Number of different characters.
        width: Channels of the residual stream.
        head: Channels of a head.
        layers: Number of blocks, and of exits.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (64,),
        classes: int = 32,
        width: int = WIDTH,
        head: int = HEAD,
        layers: int = LAYERS,
    ) -> None:
        if len(shape) != 1:
            raise InputError(
                f"transformer_exits needs rows of characters; got {tuple(shape)}; use the data set 'stories'"
            )
        check_whole("layers", layers, 1)
        super().__init__(depth=layers)
        self.embed = nn.Embedding(classes, width)
        self.places = nn.Parameter(0.02 * torch.randn(shape[0], width))
        self.blocks = nn.ModuleList([TransformerBlock(width, head) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.heads = nn.ModuleList([nn.Linear(width, classes) for _ in range(layers)])

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the stream after each block."""
        stream = self.embed(x) + self.places[: x.shape[1]]
        for block in self.blocks:
            stream = block(stream)
            yield stream

    def score(self, number: int, features: Tensor) -> Tensor:
        """Return the scores of the next character of an exit, of shape batch x characters x positions."""
        scores: Tensor = self.heads[number - 1](self.norms[number - 1](features))
        return scores.transpose(1, 2)
