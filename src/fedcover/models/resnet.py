"""ResNet-18 for small images."""

import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.errors import InputError

GROUPS = 32
"""Number of groups of every group norm."""
STAGES = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))
"""Channels and stride of the eight blocks."""


def norm_layer(kind: str, channels: int) -> nn.Module:
    """Return a norm of a kind, ``batch`` or ``group``."""
    return nn.GroupNorm(GROUPS, channels) if kind == "group" else nn.BatchNorm2d(channels)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with normalisation around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = norm_layer(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm_layer(norm, outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, norm_layer(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for a batch of images."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: 11.2 million parameters, 0.56 billion multiply-adds.

    Args:
        shape: Shape of one image.
        classes: Number of classes.
        norm: ``batch`` or ``group``; with group norms of 32 groups, units are groups of 2 to 16 channels.
    """

    def __init__(self, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10, norm: str = "batch") -> None:
        super().__init__()
        if len(shape) != 3:
            raise InputError(
                f"resnet18 needs images, channels x height x width; got {tuple(shape)}; use the mlp instead"
            )
        if norm not in ("batch", "group"):
            raise InputError(f"norm must be 'batch' or 'group'; got '{norm}'")
        self.conv = nn.Conv2d(shape[0], 64, 3, padding=1, bias=False)
        self.norm = norm_layer(norm, 64)
        blocks, width = [], 64
        for outputs, stride in STAGES:
            blocks.append(ResidualBlock(width, outputs, stride, norm))
            width = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the class scores of a batch of images."""
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        scores: Tensor = self.fc(x.mean((2, 3)))
        return scores


def resnet18_gn(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> ResNet18:
    """Return a ResNet-18 with group norm."""
    return ResNet18(shape, classes, norm="group")
