"""Augmentation: changes of a batch of inputs at random, drawn again at every step of training.

``examples.augmented(function)`` attaches one. A function of your own takes (inputs, generator) and draws only from the
generator, whose address is (seed, round, client, step): results do not depend on the engine, and survive a resume.
``Views`` are augmentations that engines can also apply on a GPU, as they gather batches there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.data.inputs import Inputs, count, parts_of, shapes
from fedcover.errors import InputError, check_bool, check_whole
from fedcover.registry import Registry

MOST_VIEWS = 1 << 31
"""The largest number of views of an input."""


class Views(ABC):
    """An augmentation that shows an input in one of a fixed number of views, all equally likely.

    Engines draw the number of the view of each input; it depends only on (seed, round, client, step) and on the
    position of the input in its batch. Subclasses must be hashable, and equal only if their views are.

    >>> class Negated(Views):
    ...     views = 2
    ...     def source(self, inputs):
    ...         return lambda rows, views: inputs[rows] * (1 - 2 * views.unsqueeze(1))
    >>> Negated().source(torch.eye(2))(torch.tensor([1]), torch.tensor([1]))
    tensor([[-0., -1.]])
    """

    views: int
    """The number of views of an input."""

    @abstractmethod
    def source(self, inputs: Inputs) -> Callable[[Tensor, Tensor], Inputs]:
        """Return a function from (rows, views) to the inputs at these rows, each in the view of its number.

        The function gets two lists of int64 on the device of the inputs. It must compute the same numbers on every
        device, and on a GPU without waiting for it: steps are captured as CUDA graphs.
        """

    def __call__(self, inputs: Inputs, rng: torch.Generator) -> Inputs:
        """Return all inputs, in views that are drawn from a generator."""
        first = next(iter(parts_of(inputs).values()))
        views = torch.randint(self.views, (count(inputs),), generator=rng).to(first.device)
        return self.source(inputs)(torch.arange(count(inputs), device=first.device), views)


@dataclass(frozen=True)
class RandomCropFlip(Views):
    """Images N x C x H x W, moved by up to ``padding`` pixels in each direction and mirrored with probability 1/2."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_whole("padding", self.padding, 0)
        check_bool("flip", self.flip)

    @property
    def views(self) -> int:  # type: ignore[override]
        """The number of offsets, twice as many with mirrored images."""
        return (2 * self.padding + 1) ** 2 * (2 if self.flip else 1)

    def source(self, inputs: Inputs) -> Callable[[Tensor, Tensor], Inputs]:
        """Return a function that gathers the pixels of views; what lies outside an image is 0."""
        if not isinstance(inputs, Tensor) or inputs.ndim != 4:
            raise InputError(f"crop and flip need images N x C x H x W; got inputs of shape {shapes(inputs)}")
        _, channels, height, width = inputs.shape
        rows_of = _pixels(height, self.padding, False).to(inputs.device)
        columns_of = _pixels(width, self.padding, self.flip).to(inputs.device)
        # A row and a column of 0 after each channel stand for all pixels outside. All rows of pixels are one list.
        lines = F.pad(inputs, [0, 1, 0, 1]).reshape(-1, width + 1)
        channel = torch.arange(channels, device=inputs.device).view(1, channels, 1, 1)

        def gather(rows: Tensor, views: Tensor) -> Tensor:
            down = rows_of.index_select(0, views // len(columns_of)).view(-1, 1, height, 1)
            along = columns_of.index_select(0, views % len(columns_of)).view(-1, 1, 1, width)
            return lines[(rows.view(-1, 1, 1, 1) * channels + channel) * (height + 1) + down, along]

        return gather


@lru_cache(maxsize=16)
def _pixels(size: int, padding: int, flip: bool) -> Tensor:
    """Return the pixels along one axis of each view: 0 to ``size`` - 1, or ``size`` for a pixel outside the image.

    Args:
        size: The number of pixels.
        padding: The largest offset; each offset is a view.
        flip: Whether each offset is a second view, mirrored.
    """
    pixels = torch.arange(-padding, padding + 1).unsqueeze(1) + torch.arange(size)
    if flip:
        pixels = torch.cat([pixels, pixels.flip(1)])
    return pixels.masked_fill_((pixels < 0) | (pixels >= size), size)


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
