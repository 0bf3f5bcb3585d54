"""Masks as bytes: the shortest of five exact encodings, chosen tensor by tensor.

A tensor's mask is written as one tag byte and a body:

======= =========================================================================================
full    empty: every entry is kept
bits    one bit for each entry
product one bit for each index of each axis: the mask is an outer product, as for whole units
kept    the flat indices of kept entries, as gaps in variable-length integers
dropped the flat indices of dropped entries, in the same form
======= =========================================================================================

A client downloads its kept values and these bytes. It uploads only kept values, since the server has the mask.

The lengths are also computed by ``packed_sizes``, and bounded by ``longest_encoding`` in masks/part_sizes.py and
``max_mask_bytes`` in deploy/wire/tensors.py; change them together, and raise ``VERSION`` in deploy/wire/frame.py.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedcover.errors import InputError
from fedcover.params import alike, spans_of, to_device
from fedcover.structure.units.masks import outer_product

FULL, BITS, PRODUCT, KEPT, DROPPED = range(5)


def pack(kept: Tensor) -> bytes:
    """Return the shortest encoding of one tensor's mask.

    >>> len(pack(torch.ones(1000, dtype=torch.bool))), len(pack(torch.arange(1000) % 2 == 0))
    (1, 126)
    """
    bits = kept.detach().cpu().numpy()
    if bits.all():
        return bytes([FULL])
    bodies = {BITS: _pack_bits(bits.reshape(-1))}
    axes = _product_axes(bits)
    if axes is not None:
        bodies[PRODUCT] = b"".join(_pack_bits(axis) for axis in axes)
    for tag, flat in ((KEPT, bits.reshape(-1)), (DROPPED, ~bits.reshape(-1))):
        # A gap takes at least one byte, so a longer list cannot be the shortest encoding.
        if int(flat.sum()) < len(bodies[BITS]):
            bodies[tag] = _pack_gaps(np.flatnonzero(flat))
    tag = min(bodies, key=lambda t: (len(bodies[t]), t))
    return bytes([tag]) + bodies[tag]


def packed_sizes(masks: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return each mask's number of kept entries and the length of its encoding, without encoding it.

    It waits for a GPU once for the counts of all masks, and twice for lists of up to 2^27 entries.

    >>> packed_sizes([torch.ones(1000, dtype=torch.bool), torch.arange(1000) % 2 == 0])
    [(1000, 1), (500, 126)]
    """
    batches = alike(masks)
    counts = torch.cat([_counts(torch.stack([masks[n] for n in batch])) for batch in batches]).tolist() if masks else []
    sizes: dict[int, tuple[int, int]] = {}
    lists: dict[int, Tensor] = {}
    values = iter(counts)
    for batch in batches:
        kinds = [[next(values) for _ in batch] for _ in range(1 + len(_axes(masks[batch[0]].shape)))]
        for number, (count, *used) in zip(batch, zip(*kinds, strict=True), strict=True):
            length, listed = _length_without_list(masks[number].shape, count, used)
            sizes[number] = count, length
            if listed is not None:
                lists[number] = masks[number].reshape(-1) if listed else ~masks[number].reshape(-1)
    for number, length in zip(lists, _listed_lengths(list(lists.values())), strict=True):
        count, other = sizes[number]
        sizes[number] = count, min(other, 1 + length)
    return [sizes[number] for number in range(len(masks))]


def packed_size_of_product(shape: Sequence[int], along: Mapping[int, npt.NDArray[np.bool_]]) -> tuple[int, int]:
    """Return ``packed_sizes`` for a mask that is an outer product.

    Args:
        shape: The shape of the tensor.
        along: Along each axis of which indices are removed, which of them stay.

    >>> packed_size_of_product((100, 10), {0: np.arange(100) % 2 == 0})
    (500, 16)
    """
    used = [int(np.count_nonzero(along[axis])) if axis in along else size for axis, size in enumerate(shape)]
    count = math.prod(used)
    length, listed = _length_without_list(shape, count, used if _axes(shape) else [])
    if listed is not None:
        length = min(length, 1 + len(_pack_gaps(np.flatnonzero(outer_product(shape, along) == listed))))
    return count, length


def _length_without_list(shape: Sequence[int], count: int, used: Sequence[int]) -> tuple[int, bool | None]:
    """Return the length of the shortest encoding that is not a list, and which list may be shorter.

    It may be the list of kept entries, True, or of the others, False, but not both. None if neither may be.

    Args:
        shape: The shape of the mask.
        count: Its number of kept entries.
        used: For each axis the number of indices with a kept entry; empty for masks of one axis.
    """
    size = math.prod(shape)
    if count == size:
        return 1, None
    length = -(-size // 8)
    if used and math.prod(used) == count:
        length = min(length, sum(-(-n // 8) for n in shape))
    # A gap takes at least one byte.
    return 1 + length, True if count < length else False if size - count < length else None


def _listed_lengths(masks: Sequence[Tensor]) -> list[int]:
    """Return the length of ``_pack_gaps`` of the entries of each mask, which has one axis; masks are on one device."""
    lengths: list[int] = []
    for some in spans_of({str(number): mask for number, mask in enumerate(masks)}):
        sizes = [mask.numel() for mask in some.values()]
        starts = to_device(torch.tensor([0, *accumulate(sizes)]), masks[0].device)
        places = torch.cat(list(some.values())).nonzero().squeeze(1)
        owners = torch.bucketize(places, starts, right=True) - 1
        before = torch.maximum(torch.cat([starts[:1] - 1, places])[:-1], starts[owners] - 1)
        widths = torch.ones_like(places)
        for k in range(1, 9):
            if 1 << 7 * k < max(sizes):
                widths += places - before > 1 << 7 * k
        lengths += torch.zeros_like(starts[:-1]).index_add_(0, owners, widths).tolist()
    return lengths


def _counts(stack: Tensor) -> Tensor:
    """Return the kept entries of each mask of a stack, then the indices along each axis with a kept entry."""
    total = stack.reshape(len(stack), -1).sum(1)
    return torch.cat([total, *(_any_along(stack, axis).sum(1) for axis in _axes(stack.shape[1:]))])


def _axes(shape: Sequence[int]) -> range:
    return range(len(shape) if len(shape) > 1 else 0)


def _any_along(stack: Tensor, axis: int) -> Tensor:
    return stack.any(dim=tuple(rest for rest in range(1, stack.ndim) if rest != axis + 1))


def unpack(data: bytes, shape: tuple[int, ...]) -> Tensor:
    """Return the mask that ``pack`` encoded, for a tensor of this shape.

    Raises:
        InputError: If the bytes are not an encoding of a mask of this shape.
    """
    size = math.prod(shape)
    if not data or data[0] > DROPPED:
        raise InputError(
            f"a packed mask starts with {data[:1]!r}, which is not a known encoding; it is corrupt; send it again"
        )
    tag, body = data[0], data[1:]
    if tag == FULL:
        _expect(len(body) == 0)
        return torch.ones(shape, dtype=torch.bool)
    if tag == BITS:
        return torch.from_numpy(_unpack_bits(body, size).reshape(shape))
    if tag == PRODUCT:
        ends = np.cumsum([0] + [-(-n // 8) for n in shape])
        _expect(len(body) == ends[-1])
        kept = np.ones(shape, dtype=bool)
        for i, n in enumerate(shape):
            axis = _unpack_bits(body[ends[i] : ends[i + 1]], n)
            kept &= axis.reshape([-1 if j == i else 1 for j in range(len(shape))])
        return torch.from_numpy(kept)
    flat = np.zeros(size, dtype=bool)
    indices = _unpack_gaps(body)
    _expect(len(indices) == 0 or int(indices[-1]) < size)
    flat[indices] = True
    return torch.from_numpy((flat if tag == KEPT else ~flat).reshape(shape))


def _expect(fits: bool) -> None:
    if not fits:
        raise InputError(
            "a packed mask does not fit its tensor's shape; it is corrupt or belongs to another model; send it again"
        )


def _pack_bits(flat: np.ndarray) -> bytes:
    return np.packbits(flat, bitorder="little").tobytes()


def _unpack_bits(body: bytes, size: int) -> np.ndarray:
    _expect(len(body) == -(-size // 8))
    return np.unpackbits(np.frombuffer(body, dtype=np.uint8), count=size, bitorder="little").astype(bool)


def _product_axes(bits: np.ndarray) -> list[np.ndarray] | None:
    """Return one mask per axis if the mask is their outer product, else None."""
    if bits.ndim < 2:
        return None
    axes = [np.asarray(bits.any(axis=tuple(j for j in range(bits.ndim) if j != i))) for i in range(bits.ndim)]
    if math.prod(int(axis.sum()) for axis in axes) != int(bits.sum()):
        return None
    return axes


def _pack_gaps(indices: np.ndarray) -> bytes:
    """Encode the gaps between sorted indices as little-endian base-128 integers."""
    gaps = np.diff(indices, prepend=-1).astype(np.uint64) - np.uint64(1)
    width = np.ones(len(gaps), dtype=np.int64)
    for k in range(1, 10):
        width += gaps >= np.uint64(1) << np.uint64(7 * k) if 7 * k < 64 else 0
    out = np.zeros(int(width.sum()), dtype=np.uint8)
    starts = np.cumsum(width) - width
    for k in range(int(width.max(initial=0))):
        long = width > k
        low = (gaps[long] >> np.uint64(7 * k)) & np.uint64(127)
        continues = (width[long] > k + 1).astype(np.uint64) << np.uint64(7)
        out[starts[long] + k] = (low | continues).astype(np.uint8)
    return out.tobytes()


def _unpack_gaps(body: bytes) -> np.ndarray:
    """Return the sorted indices that ``_pack_gaps`` encoded."""
    raw = np.frombuffer(body, dtype=np.uint8)
    last = raw < 128
    _expect(len(raw) == 0 or bool(last[-1]))
    ends = np.flatnonzero(last)
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64) if len(ends) else ends
    _expect(len(ends) == 0 or int((ends - starts).max()) < 5)
    gaps = np.zeros(len(ends), dtype=np.int64)
    for k in range(int((ends - starts).max(initial=-1)) + 1):
        long = starts + k <= ends
        gaps[long] |= (raw[starts[long] + k].astype(np.int64) & 127) << (7 * k)
    return np.cumsum(gaps + 1) - 1
