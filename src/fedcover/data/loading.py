"""How the data sets of the table are found on disk, described and loaded."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedcover.data import stories as generated
from fedcover.data.catalogue import SOURCES, Source
from fedcover.data.copies import AGAIN, Copy, find
from fedcover.data.examples import Examples
from fedcover.data.formats import cifar, digits, idx
from fedcover.data.verify import Verdict, verify
from fedcover.errors import InputError

Folder = str | Path | None
STORIES = "stories"
"""The data set that is generated."""


@dataclass(frozen=True)
class Split:
    """A data set's training and test examples.

    >>> split = load("digits")
    >>> len(split.train), len(split.test)
    (1437, 360)
    """

    train: Examples
    test: Examples

    @property
    def provenance(self) -> str:
        """The sentence that says whose copy this is and against what it was verified."""
        return self.train.provenance


@dataclass(frozen=True)
class Description:
    """Where a data set was found (None: nowhere), whether it is verified, and the sentence that says why."""

    name: str
    where: Path | None
    verified: bool
    provenance: str


def names() -> list[str]:
    """The names of the data sets that fedcover can load.

    >>> names()
    ['mnist', 'fashion_mnist', 'cifar10', 'digits', 'stories']
    """
    return [*SOURCES, STORIES]


def source_of(name: str | Source) -> Source:
    """The table's entry for a name; a Source is its own.

    >>> source_of("mnist").counts
    (60000, 10000)
    """
    if isinstance(name, Source):
        return name
    if name == STORIES:
        raise InputError(f"{name} is made by fedcover itself and has no files; nothing needs to be fetched")
    if name not in SOURCES:
        near = difflib.get_close_matches(str(name).lower(), names(), n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"there is no data set named {name!r}; {remedy}choose from {', '.join(names())}")
    return SOURCES[name]


def shape_of(name: str) -> tuple[tuple[int, ...], int]:
    """The shape of an example of a data set, and the number of its classes; its files need not be there.

    >>> shape_of("mnist")
    ((1, 28, 28), 10)
    """
    if name == STORIES:
        train = load(name).train
        return tuple(train.inputs.shape[1:]), train.classes
    source = source_of(name)
    return source.shape, source.classes


def cache_folder() -> Path:
    """The folder that holds what was fetched: $XDG_CACHE_HOME/fedcover, or ~/.cache/fedcover.

    >>> cache_folder().name
    'fedcover'
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "fedcover"


def data_folder(folder: Folder = None) -> Path | None:
    """The caller's own data folder: the argument, else $FEDCOVER_DATA, else None.

    >>> data_folder("/data").name
    'data'
    """
    given = folder if folder is not None else os.environ.get("FEDCOVER_DATA") or None
    return None if given is None else Path(given).expanduser()


def places(source: Source, folder: Folder = None) -> list[Path]:
    """The folders in which a data set is looked for, in order."""
    if source.home is not None:
        return [source.home]
    own = data_folder(folder)
    return [parent / source.name for parent in (own, cache_folder()) if parent is not None]


def locate(source: Source, folder: Folder = None) -> Copy | None:
    """The first complete copy of a data set, or None where it is nowhere."""
    found = (find(source.name, source.layouts, place) for place in places(source, folder))
    return next((copy for copy in found if copy is not None), None)


def load(name: str | Source, folder: Folder = None) -> Split:
    """The training and test examples of a data set, verified, as normalised float32 tensors N x C x H x W.

    It is looked for in ``folder`` (else $FEDCOVER_DATA) / name, then in the cache folder. ``stories`` are made.

    >>> load("digits").train.inputs.shape
    torch.Size([1437, 1, 8, 8])
    """
    if name == STORIES:
        return Split(*generated.stories())
    source = source_of(name)
    copy = locate(source, folder)
    if copy is None:
        raise InputError(_nowhere(source, folder))
    verdict = verify(source.name, copy)
    arrays = _read(copy)
    train, test = source.counts
    return Split(
        train=_examples(source, copy, verdict, arrays[0], arrays[1], train),
        test=_examples(source, copy, verdict, arrays[2], arrays[3], test),
    )


def inputs_like(name: str, given: NDArray[Any], whose: str) -> torch.Tensor:
    """Inputs of one's own as a data set has them: floats as they are, bytes of pixels normalised as ``load`` does it.

    >>> inputs_like("mnist", np.full((1, 1, 28, 28), 255, np.uint8), "mine.npz").max().item()
    2.821486711502075
    """
    kind = given.dtype.kind
    if name == STORIES:
        if kind not in "iu":
            raise InputError(f"{whose} has inputs of {given.dtype}, and those of {name} are whole numbers; write such")
        return torch.from_numpy(given.astype(np.int64))
    source = source_of(name)
    if given.dtype == np.uint8:
        if given.size and given.max() > source.top:
            raise InputError(
                f"{whose} has bytes up to {given.max()}, and pixels of {name} go up to {source.top:g}; scale them"
            )
        return _normalised(source, given)
    if kind != "f":
        raise InputError(
            f"{whose} has inputs of {given.dtype}; write pixels as bytes (uint8, 0 to {source.top:g}), or floats that"
            f" are normalised as those of {name}"
        )
    return torch.from_numpy(given.astype(np.float32))  # numpy's own are doubles, which models here do not take


def describe(name: str | Source, folder: Folder = None) -> Description:
    """Where a data set is and whether it is verified; nothing is parsed, and a bad copy is no error here.

    >>> describe("digits").verified
    True
    """
    if name == STORIES:
        return Description(STORIES, Path(generated.__file__).parent, True, generated.CREDIT)
    source = source_of(name)
    copy = None
    try:
        copy = locate(source, folder)
        if copy is None:
            return Description(source.name, None, False, _nowhere(source, folder))
        verdict = verify(source.name, copy)
    except InputError as why:
        return Description(source.name, copy.place if copy else None, False, str(why))
    return Description(source.name, copy.place, verdict.verified, source.credit or verdict.provenance)


def _nowhere(source: Source, folder: Folder) -> str:
    looked = " or ".join(str(place) for place in places(source, folder))
    return (
        f"{source.name} was not found in {looked}; run `fedcover data get {source.name}`, "
        f"or point --data (FEDCOVER_DATA) at a folder that has {source.name}/"
    )


def _read(copy: Copy) -> tuple[NDArray[np.uint8], ...]:
    """Training images, training labels, test images and test labels, as bytes."""
    files = [(raw, f"{copy.place / file}") for file, raw in copy.contents.items()]
    if copy.layout.kind == "digits":
        return digits.parse_digits(*files[0])
    if copy.layout.kind == "idx":
        return tuple(idx.parse_idx(*file) for file in files)
    parse = cifar.parse_binary if copy.layout.kind == "cifar binary" else cifar.parse_python
    batches = [parse(*file) for file in files]
    images, labels = zip(*batches[:-1], strict=True)
    return np.concatenate(images), np.concatenate(labels), *batches[-1]


def _normalised(source: Source, pixels: NDArray[np.uint8]) -> torch.Tensor:
    """Pixels as float32, in the shape of the data set's examples."""
    inputs = torch.tensor(pixels, dtype=torch.float32).reshape(-1, *source.shape).div_(source.top)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (source.mean, source.std))
    return inputs.sub_(mean).div_(std)


def _examples(
    source: Source, copy: Copy, verdict: Verdict, images: NDArray[np.uint8], labels: NDArray[np.uint8], count: int
) -> Examples:
    shape = source.shape if images.ndim == 4 else source.shape[1:]
    if images.shape[1:] != shape or labels.ndim != 1:
        sizes = " x ".join(map(str, images.shape))
        raise InputError(f"{source.name} in {copy.place} must have images of {shape}; got {sizes}; {AGAIN}")
    if not verdict.verified and len(images) != count:
        raise InputError(f"{source.name} in {copy.place} must have {count} images; got {len(images)}; {AGAIN}")
    return Examples(
        _normalised(source, images),
        torch.tensor(labels, dtype=torch.int64),
        source.classes,
        name=source.name,
        provenance=source.credit or verdict.provenance,
    )
