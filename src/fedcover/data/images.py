"""Images of a named data set: from the pixels in its files to normalised examples."""

from typing import Any

import torch
from numpy.typing import NDArray

from fedcover.data.catalogue import Source
from fedcover.data.copies import AGAIN
from fedcover.data.examples import Examples
from fedcover.errors import InputError


def normalised(source: Source, pixels: NDArray[Any]) -> torch.Tensor:
    """Return pixels as normalised float32, in the shape of the data set's examples."""
    inputs = torch.tensor(pixels, dtype=torch.float32).reshape(-1, *source.shape).div_(source.top)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return inputs.sub_(mean).div_(std)


def image_examples(source: Source, where: str, provenance: str, images: NDArray[Any], labels: NDArray[Any]) -> Examples:
    """Return images with their labels as examples.

    Raises:
        InputError: If they do not have the shape of the data set's images; the message names ``where``.
    """
    shape = source.shape if images.ndim == 4 else source.shape[1:]
    if images.shape[1:] != shape or labels.ndim != 1:
        sizes = " x ".join(map(str, images.shape))
        raise InputError(f"{source.name} in {where} must have images of {shape}; got {sizes}; {AGAIN}")
    return Examples(
        normalised(source, images),
        torch.tensor(labels, dtype=torch.int64),
        source.classes,
        name=source.name,
        provenance=provenance,
        licence=source.licence,
    )
