"""Texts for next-character prediction: one alphabet, rows of characters, and a split within each client's text."""

import re
import unicodedata
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcover.data.examples import Examples
from fedcover.data.population import Population
from fedcover.data.split import Split

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""The line break and the printable characters of ASCII; a character's number is its place."""
ROW = 80
"""Characters of an example."""
TEST_SHARE = 0.2
"""The share of each client's text, at its end, that is for testing."""

_OTHER = re.compile(r"[^\n -~]")
_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "‑": "-", "•": "*", "\t": " "})


class TextSource(NamedTuple):
    """The description of a text for its examples."""

    name: str
    provenance: str
    licence: str


def plain(text: str) -> str:
    """Return a text in the alphabet: accents are dropped, quotes and dashes become those of ASCII.

    >>> plain("na\\u00efve \\u201cman\\u201d")
    'naive "man"'
    """
    return _OTHER.sub("", unicodedata.normalize("NFKD", text.translate(_ASCII)))


def encode(text: str) -> Tensor:
    """Return the number of each character of a text, after ``plain``.

    >>> encode("a b\\n").tolist()
    [66, 1, 67, 0]
    """
    codes = np.frombuffer(plain(text).encode("ascii"), np.uint8).astype(np.int64)
    return torch.from_numpy(np.maximum(codes - 31, 0))


def rows(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of characters, and for each position the character that follows; an incomplete row is left out.

    >>> inputs, labels = rows(torch.arange(200))
    >>> inputs.shape, labels[1, :3].tolist()
    (torch.Size([2, 80]), [81, 82, 83])
    """
    count = max(len(numbers) - 1, 0) // ROW
    end = count * ROW
    return numbers[:end].reshape(count, ROW), numbers[1 : end + 1].reshape(count, ROW)


def next_character(texts: Mapping[str, str], source: TextSource) -> Split:
    """Return the examples of texts by client: the last fifth of each text is for testing.

    Args:
        texts: The text of each client, long enough for a row in both parts.
        source: Name, provenance and licence of the data set.

    >>> split = next_character({"ann": "to be or not " * 40}, TextSource("ann", "", ""))
    >>> len(split.train), len(split.test)
    (5, 1)
    """
    parts: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
    for text in texts.values():
        numbers = encode(text)
        cut = len(numbers) - int(TEST_SHARE * len(numbers))
        parts[0].append(rows(numbers[:cut]))
        parts[1].append(rows(numbers[cut:]))
    (train, clients), (test, own) = (_population(part, source) for part in parts)
    names = list(texts)
    tests = Population(test, own, names)
    return Split(train, test, Population(train, clients, names, tests), tests)


def _population(parts: list[tuple[Tensor, Tensor]], source: TextSource) -> tuple[Examples, list[Tensor]]:
    """Return the rows of all clients as one set of examples, and each client's indices."""
    inputs, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    ends = accumulate((len(x) for x, _ in parts), initial=0)
    indices = [torch.arange(start, end) for start, end in pairwise(ends)]
    examples = Examples(
        inputs, labels, len(ALPHABET), name=source.name, provenance=source.provenance, licence=source.licence
    )
    return examples, indices
