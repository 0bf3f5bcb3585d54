"""The paper's two networks and a ResNet-18, as plain modules."""

from collections.abc import Callable
from difflib import get_close_matches

import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError
from fedcover.seeding import ambient

GROUPS = 32
"""The groups of every group norm."""


class MLP(nn.Module):
    """784-200-10 with dropout on the hidden layer: 159,010 parameters, 158,800 multiply-adds."""

    def __init__(self, shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, hidden: int = 200) -> None:
        super().__init__()
        features = 1
        for side in shape:
            features *= side
        self.fc1 = nn.Linear(features, hidden)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores for a batch of images."""
        scores: Tensor = self.fc2(F.relu(self.dropout(self.fc1(x.flatten(1)))))
        return scores


class LeNet(nn.Module):
    """Two convolutions and 400-120-100-10: 64,102 parameters, 653,800 multiply-adds on 3 x 32 x 32."""

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3 or min(shape[1:]) < 16:
            raise InputError(f"lenet needs images of at least 16 x 16; these are {tuple(shape)}: use the mlp instead")
        side = [((n - 4) // 2 - 4) // 2 for n in shape[1:]]
        self.conv1 = nn.Conv2d(shape[0], 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side[0] * side[1], 120)
        self.fc2 = nn.Linear(120, 100)
        self.fc3 = nn.Linear(100, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores for a batch of images."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        scores: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))
        return scores


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with group norm around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.GroupNorm(GROUPS, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of images."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """The ResNet-18 for small images, with group norm: 11.2 million parameters, 0.56 billion multiply-adds."""

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        if len(shape) != 3:
            raise InputError(f"resnet18 needs images, channels x height x width; these are {tuple(shape)}: use the mlp")
        self.conv = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(GROUPS, 64)
        blocks, width = [], 64
        for outputs, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
            blocks.append(ResidualBlock(width, outputs, stride))
            width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores for a batch of images."""
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"mlp": MLP, "lenet": LeNet, "resnet18": ResNet18}

IMAGES: dict[str, tuple[int, ...]] = {"mlp": (1, 28, 28), "lenet": (3, 32, 32), "resnet18": (3, 32, 32)}
"""The shape of image that each network is for."""


def build(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """A named model for images of this shape, initialised from the seed alone.

    >>> sum(p.numel() for p in build("mlp", (1, 28, 28), 10, seed=0).parameters())
    159010
    """
    if name not in MODELS:
        near = get_close_matches(name, MODELS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise InputError(f"there is no model '{name}'; use one of {', '.join(MODELS)}{hint}")
    with ambient(seed, "model", name):
        return MODELS[name](shape, classes)
