"""Augmentation: changes of a batch of inputs at random, drawn again at every step of training.

``examples.augmented(function)`` attaches one. A function of your own takes (inputs, generator) and draws only from the
generator, whose address is (seed, round, client, step): results do not depend on the engine, and survive a resume.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.data.inputs import Inputs, shapes
from fedcover.errors import InputError, check_bool, check_whole
from fedcover.registry import Registry


@dataclass(frozen=True)
class RandomCropFlip:
    """Images N x C x H x W, moved by up to ``padding`` pixels in each direction and mirrored with probability 1/2."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_whole("padding", self.padding, 0)
        check_bool("flip", self.flip)

    def __call__(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        """Return the changed images; what lies outside them is 0."""
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            raise InputError(f"crop and flip need images N x C x H x W; got inputs of shape {shapes(inputs)}")
        count, _, height, width = inputs.shape
        rows, columns = (torch.randint(2 * self.padding + 1, (count, 1), generator=rng) for _ in range(2))
        down, along = rows + torch.arange(height), (columns + torch.arange(width)).expand(count, width)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=rng) < 0.5
            along = torch.where(mirrored, along.flip(1), along)
        padded = F.pad(inputs, [self.padding] * 4)
        number = torch.arange(count).view(-1, 1, 1)
        return padded.movedim(1, -1)[number, down.unsqueeze(2), along.unsqueeze(1)].movedim(-1, 1).contiguous()


AUGMENTATIONS: Registry[RandomCropFlip] = Registry("augmentation")
"""The augmentations by name."""


@AUGMENTATIONS.register("crop_flip")
def random_crop_flip(padding: int = 4, flip: bool = True) -> RandomCropFlip:
    """Move images by up to some pixels and mirror them, as usual for CIFAR-10.

    Args:
        padding: The largest number of pixels by which an image is moved in each direction.
        flip: Whether half of the images are mirrored.

    >>> images = random_crop_flip(1)(torch.ones(2, 3, 8, 8), torch.Generator().manual_seed(0))
    >>> images.shape
    torch.Size([2, 3, 8, 8])
    """
    return RandomCropFlip(padding, flip)
