"""Networks that several tests use."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedcover as fc
from fedcover.models import ResNet18
from fedcover.params import params_of
from fedcover.structure.exits import ExitModel

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


class ExitNet(ExitModel):
    """Equal blocks of one linear layer with dropout, each with an exit; of six, the first has 17 % of the entries."""

    def __init__(self, depth: int = 6, inputs: int = 6, width: int = 16, classes: int = 3) -> None:
        super().__init__(depth)
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.drop = nn.Dropout(0.1)
        self.heads = nn.ModuleList([nn.Linear(width, classes) for _ in range(depth)])

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            x = x + F.relu(block(self.drop(x)))
            yield x

    def score(self, number: int, features: Tensor) -> Tensor:
        scores: Tensor = self.heads[number - 1](features)
        return scores


class ExitConvolutions(ExitModel):
    """Three stages of convolutions with batch norm, each wider than the one before, with an exit behind each."""

    def __init__(self) -> None:
        super().__init__(3)
        widths = (2, 3, 6, 8)
        self.stem = nn.Conv2d(1, widths[0], 3, padding=1)
        pairs = list(pairwise(widths))
        self.convs = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in pairs])
        self.norms = nn.ModuleList([nn.BatchNorm2d(b) for _, b in pairs])
        self.heads = nn.ModuleList([nn.Linear(b, 3) for _, b in pairs])

    def stages(self, x: Tensor) -> Iterator[Tensor]:
        x = F.relu(self.stem(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
            yield x

    def score(self, number: int, features: Tensor) -> Tensor:
        scores: Tensor = self.heads[number - 1](features.mean((2, 3)))
        return scores


def narrow_resnet18(norm: str) -> nn.Module:
    """Return ResNet-18 for three classes of small images, with a quarter of its units."""
    model, example = ResNet18((3, 16, 16), 3, norm), torch.zeros(2, 3, 16, 16)
    policy = fc.neuron_pruning().bind(fc.trace(model, example))
    (plan,), _ = policy.plan(params_of(model), [fc.Client(0, 0, fc.Budget(0.25))], fc.Round(1, 0), policy.start())
    return fc.shrink(model, plan.mask, example).model
