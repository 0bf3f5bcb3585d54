"""Tensors and masks as parts of a message: kept values alone, and masks in their cheapest encoding."""

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedcover.deploy.wire.frame import MOST_HEAD, shown
from fedcover.errors import InputError
from fedcover.masks.encoding import pack, unpack
from fedcover.params import Mask

TYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
"""The types of parameters that travel."""
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers as wide as a value: numpy knows their byte order, and has no bfloat16."""

Parts = dict[str, memoryview]


def bytes_of(theta: Mapping[str, Tensor]) -> int:
    """The bytes of all values of a model."""
    return sum(tensor.numel() * tensor.element_size() for tensor in theta.values())


def mask_bytes_of(theta: Mapping[str, Tensor]) -> int:
    """The most bytes of a packed mask of a model."""
    return sum(tensor.numel() // 8 + 2 for tensor in theta.values())


def head_bytes_of(theta: Mapping[str, Tensor]) -> int:
    """The most bytes of the head of an answer about a model, whose tensors it names a few times."""
    long = [(len(json.dumps(name)) + 32, 24 * tensor.ndim) for name, tensor in theta.items()]
    return min(MOST_HEAD, 4096 + sum(10 * name + 2 * shape for name, shape in long))


def table_of(theta: Mapping[str, Tensor]) -> list[list[object]]:
    """What a model is to its peer: name, type and shape of each tensor.

    >>> table_of({"w": torch.zeros(2, 3)})
    [['w', 'float32', [2, 3]]]
    """
    for name, tensor in theta.items():
        if tensor.dtype not in TYPES:
            raise InputError(f"'{name}' is {tensor.dtype}, which does not travel; use a real floating-point type")
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in theta.items()]


def difference(theirs: object, like: Mapping[str, Tensor]) -> str | None:
    """How the peer's model differs from this one, at the first tensor that does; None if it is the same."""
    ours = table_of(like)
    if theirs == ours:
        return None
    if not isinstance(theirs, list) or not all(
        isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) for row in theirs
    ):
        return "its tensors are not listed by name, type and shape"
    found = {row[0]: row[1:] for row in theirs}
    if len(found) != len(theirs):
        return "it lists a tensor twice"
    for name, *here in ours:
        if name not in found:
            return f"it has no '{name}', which the model here has"
        there = found.pop(str(name))
        for what, a, b in zip(("type", "shape"), there, here, strict=True):
            if a != b:
                return f"'{name}' has the {what} {_dims(a)} there and {_dims(b)} here"
    return f"it has {shown(next(iter(found)))}, which the model here has not" if found else None


def _dims(value: object) -> str:
    """A type or a shape in a few characters."""
    if isinstance(value, list) and len(value) <= 8 and all(type(n) is int for n in value):
        return f"({', '.join(map(str, value))})"
    return value[:20] if isinstance(value, str) and value.isascii() and value.isalnum() else shown(value)


def put_values(values: Tensor, kept: Tensor | None) -> bytes:
    """The kept values, row by row, as little-endian bytes; all of them if ``kept`` is None.

    >>> put_values(torch.tensor([1, 2, 3], dtype=torch.int16), torch.tensor([True, False, True])).hex()
    '01000300'
    """
    whole = values.detach().cpu().contiguous()
    raw = whole.view(CARRIERS[whole.element_size()]).numpy()
    held = raw if kept is None else raw[kept.cpu().numpy()]  # numpy picks out several times as fast as torch
    return held.astype(held.dtype.newbyteorder("<"), copy=False).tobytes()


def take_values(parts: Parts, part: str, name: str, like: Tensor, kept: Tensor | None) -> Tensor:
    """The values in a part at their places in a tensor like another, on the CPU, and exactly zero elsewhere."""
    data = parts.pop(f"{part}/{name}", None)
    if data is None:
        raise InputError(f"the message has no {part}/{name}; send it")
    places = None if kept is None else kept.cpu().numpy()
    many, size = like.numel() if places is None else int(np.count_nonzero(places)), like.element_size()
    if len(data) != many * size:
        raise InputError(f"the message has {len(data)} bytes of {part}/{name}, not {many * size}; send the kept values")
    raw = np.frombuffer(data, dtype=np.dtype(f"<{'u' if size == 1 else 'i'}{size}"))
    full = np.zeros(tuple(like.shape), dtype=raw.dtype.newbyteorder("="))  # a copy, which may be written to
    if places is None:
        full[...] = raw.reshape(full.shape)
    else:
        full[places] = raw
    return torch.from_numpy(full).view(like.dtype)


def put_mask(mask: Mask, parts: dict[str, bytes]) -> list[str]:
    """The names of a mask, for the head; its tensors go into the parts, but for those that keep everything."""
    for name, kept in mask.items():
        if not bool(kept.all()):
            parts[f"mask/{name}"] = pack(kept)
    return list(mask)


def take_mask(parts: Parts, names: object, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The mask with these names."""
    if not isinstance(names, list):
        raise InputError(f"the names of a mask are {shown(names)}; send a list")
    mask: dict[str, Tensor] = {}
    for name in names:
        if not isinstance(name, str) or name not in like or name in mask:
            raise InputError(f"a mask names {shown(name)}, which is no tensor or is there twice; name each once")
        mask[name] = take_kept(parts, f"mask/{name}", like[name])
    return mask


def take_kept(parts: Parts, part: str, like: Tensor) -> Tensor:
    """The mask of one tensor; what is not in the parts keeps everything."""
    if (data := parts.pop(part, None)) is None:
        return torch.ones(like.shape, dtype=torch.bool)
    if len(data) > (most := mask_bytes_of({part: like})):
        raise InputError(f"{shown(part)} of the message has {len(data)} bytes; a packed mask has at most {most}")
    return unpack(bytes(data), tuple(like.shape))
