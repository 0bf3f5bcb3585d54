"""Encodings of masks: the shortest is chosen, and invalid bytes are refused."""

import pytest
import torch

from fedcover.errors import InputError
from fedcover.masks.encoding import BITS, DROPPED, FULL, KEPT, PRODUCT, pack, packed_sizes, unpack


@pytest.mark.parametrize(
    ("mask", "tag", "size"),
    [
        (torch.ones(100, 100), FULL, 1),
        (torch.arange(10000).reshape(100, 100) % 3, BITS, 1 + 1250),
        (torch.outer(torch.arange(100) % 3 > 0, torch.arange(100) % 2 > 0), PRODUCT, 1 + 13 + 13),
        (torch.arange(10000).reshape(100, 100) == 77, KEPT, 2),
        (torch.arange(10000).reshape(100, 100) != 7777, DROPPED, 3),
        (torch.zeros(100, 100), KEPT, 1),
    ],
)
def test_the_shortest_encoding_is_chosen(mask: torch.Tensor, tag: int, size: int) -> None:
    packed = pack(mask.bool())
    assert (packed[0], len(packed)) == (tag, size)
    assert packed_sizes([mask.bool()]) == [(int(mask.bool().sum()), size)]
    assert torch.equal(unpack(packed, (100, 100)), mask.bool())


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x09", b"\x00\x01", b"\x01", b"\x01\xff", b"\x02\xff", b"\x03\xff", b"\x03\x7f",
        b"\x04\xff\xff\xff\xff\xff\x01",
        b"\x01" + b"\xff" * 100,
    ],
)  # fmt: skip
def test_invalid_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="corrupt"):
        unpack(data, (3, 5))
