"""Readers of the named data sets: from a verified copy to training and test examples, with their natural clients."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcover.data.catalogue import Source
from fedcover.data.copies import AGAIN, Copy
from fedcover.data.formats import cifar, digits, idx, qmnist, quickdraw, shakespeare, sotu
from fedcover.data.images import image_examples
from fedcover.data.population import Population
from fedcover.data.split import Split
from fedcover.data.text import TextSource, next_character
from fedcover.errors import InputError

File = tuple[bytes, str]
"""The content of a file and its path."""


def read(source: Source, copy: Copy, provenance: str) -> Split:
    """Return the examples in a copy of a data set.

    Args:
        source: The catalogue's entry.
        copy: The copy.
        provenance: Sentence on the origin of the copy.

    Raises:
        InputError: If the files do not have the form of the data set.
    """
    files = [(raw, f"{copy.location / file}") for file, raw in copy.contents.items()]
    if source.text:
        text = TextSource(source.name, provenance, source.licence)
        return next_character(_texts(copy.layout.kind, files), text)
    arrays = _images(copy.layout.kind, files, source.classes)
    train, test = (image_examples(source, str(copy.location), provenance, *part) for part in (arrays[:2], arrays[2:]))
    return Split(train, test)


def read_writers(source: Source, copy: Copy, provenance: str, mnist: Split) -> Split:
    """Return MNIST with its writers as clients; those of the test set are other people.

    Args:
        source: The catalogue's entry.
        copy: The copy of QMNIST's label files.
        provenance: Sentence on its origin.
        mnist: The digits.
    """
    populations = []
    for (file, raw), examples in zip(copy.contents.items(), mnist, strict=True):
        writers = qmnist.parse_writers(raw, f"{copy.location / file}", examples.class_labels().numpy())
        digits = replace(
            examples,
            name=source.name,
            provenance=f"{provenance}; digits: {examples.provenance}",
            licence=source.licence,
        )
        numbers = np.unique(writers)
        parts = [torch.from_numpy(np.flatnonzero(writers == number)) for number in numbers]
        populations.append(Population(digits, parts, [f"writer {number}" for number in numbers]))
    train, test = populations
    if both := set(train.names) & set(test.names):
        raise InputError(f"{copy.location} has {min(both)} in the training and in the test set; {AGAIN}")
    return Split(train.examples, test.examples, train, test)


def _images(kind: str, files: list[File], classes: int) -> tuple[NDArray[Any], ...]:
    """Return training images, training labels, test images and test labels."""
    if kind == "digits":
        return digits.parse_digits(*files[0])
    if kind == "quickdraw":
        return quickdraw.parse_drawings(*files[0], classes)
    if kind == "idx":
        return tuple(idx.parse_idx(*file) for file in files)
    parse = cifar.parse_binary if kind == "cifar binary" else cifar.parse_python
    batches = [parse(*file) for file in files]
    images, labels = zip(*batches[:-1], strict=True)
    return np.concatenate(images), np.concatenate(labels), *batches[-1]


def _texts(kind: str, files: list[File]) -> dict[str, str]:
    """Return the text of each client."""
    if kind == "sotu":
        return sotu.parse_addresses(*files[0])
    return shakespeare.parse_plays({Path(where).name: raw.decode("latin-1") for raw, where in files})
