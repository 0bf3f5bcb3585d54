"""Tensors and masks as parts of a message: only kept values, and masks in their cheapest encoding."""

import json
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedcover.deploy.wire.frame import MAX_HEAD_BYTES, short_repr
from fedcover.errors import InputError
from fedcover.masks.encoding import pack, unpack
from fedcover.params import Mask, Params
from fedcover.training.recipes import moment_dtype

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
"""The types of parameters that can be sent."""
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer types by the bytes of a value: numpy converts their byte order, and has no bfloat16."""

Parts = dict[str, memoryview]


def num_bytes(theta: Mapping[str, Tensor]) -> int:
    """Return the number of bytes of all values of a model."""
    return sum(tensor.numel() * tensor.element_size() for tensor in theta.values())


def max_mask_bytes(theta: Mapping[str, Tensor]) -> int:
    """Return an upper bound on the bytes of a model's packed mask."""
    return sum(tensor.numel() // 8 + 2 for tensor in theta.values())


def max_head_bytes(theta: Mapping[str, Tensor]) -> int:
    """Return an upper bound on the bytes of a reply's head, which names the model's tensors a few times."""
    sizes = [(len(json.dumps(name)) + 32, 24 * tensor.ndim) for name, tensor in theta.items()]
    return min(MAX_HEAD_BYTES, 4096 + sum(10 * name + 2 * shape for name, shape in sizes))


def tensor_table(theta: Mapping[str, Tensor]) -> list[list[object]]:
    """Return the name, type and shape of each tensor, by which peers compare their models.

    >>> tensor_table({"w": torch.zeros(2, 3)})
    [['w', 'float32', [2, 3]]]
    """
    for name, tensor in theta.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"'{name}' is {tensor.dtype}, which cannot be sent; use a real floating-point type")
    return [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in theta.items()]


def model_difference(table: object, like: Mapping[str, Tensor]) -> str | None:
    """Return how the model of a peer's table differs from this one at the first such tensor; None if it does not."""
    expected = tensor_table(like)
    if table == expected:
        return None
    if not isinstance(table, list) or not all(
        isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) for row in table
    ):
        return "its tensors are not listed by name, type and shape"
    rows = {row[0]: row[1:] for row in table}
    if len(rows) != len(table):
        return "it lists a tensor twice"
    for name, *local in expected:
        if name not in rows:
            return f"it does not have '{name}', which is a tensor of the model here"
        remote = rows.pop(str(name))
        for kind, theirs, ours in zip(("type", "shape"), remote, local, strict=True):
            if theirs != ours:
                return f"'{name}' has the {kind} {_short_dims(theirs)} there and {_short_dims(ours)} here"
    return f"it has {short_repr(next(iter(rows)))}, which is not a tensor of the model here" if rows else None


def _short_dims(value: object) -> str:
    """Return a type or a shape in a few characters."""
    if isinstance(value, list) and len(value) <= 8 and all(type(n) is int for n in value):
        return f"({', '.join(map(str, value))})"
    return value[:20] if isinstance(value, str) and value.isascii() and value.isalnum() else short_repr(value)


def encode_values(values: Tensor, kept: Tensor | None) -> bytes:
    """Return the kept values in row-major order as little-endian bytes; all of them if ``kept`` is None.

    >>> encode_values(torch.tensor([1, 2, 3], dtype=torch.int16), torch.tensor([True, False, True])).hex()
    '01000300'
    """
    dense = values.detach().cpu().contiguous()
    raw = dense.view(CARRIERS[dense.element_size()]).numpy()
    selected = raw if kept is None else raw[kept.cpu().numpy()]  # numpy selects several times as fast as torch
    return selected.astype(selected.dtype.newbyteorder("<"), copy=False).tobytes()


def decode_values(parts: Parts, part: str, name: str, like: Tensor, kept: Tensor | None) -> Tensor:
    """Remove the part of a tensor's kept values and return the tensor, on the CPU and zero elsewhere.

    Args:
        parts: The parts not yet read.
        part: The kind of values, such as ``theta``.
        name: The name of the tensor.
        like: A tensor of the expected shape and type.
        kept: The mask of the tensor; None if all values were sent.

    Raises:
        InputError: If the part is missing or has the wrong length.
    """
    data = parts.pop(f"{part}/{name}", None)
    if data is None:
        raise InputError(f"the message has no {part}/{name}; send it")
    selected = None if kept is None else kept.cpu().numpy()
    size = like.element_size()
    expected = size * (like.numel() if selected is None else int(np.count_nonzero(selected)))
    if len(data) != expected:
        raise InputError(
            f"the message has {len(data)} bytes of {part}/{name}, not {expected}; send exactly the kept values"
        )
    raw = np.frombuffer(data, dtype=np.dtype(f"<{'u' if size == 1 else 'i'}{size}"))
    dense = np.zeros(tuple(like.shape), dtype=raw.dtype.newbyteorder("="))  # a writable copy
    if selected is None:
        dense[...] = raw.reshape(dense.shape)
    else:
        dense[selected] = raw
    return torch.from_numpy(dense).view(like.dtype)


def encode_moments(
    moments: Mapping[str, Mapping[str, Tensor]], mask: Mask, parts: dict[str, bytes]
) -> dict[str, list[str]]:
    """Return the names of the tensors of each moment, for the head; add their kept values to ``parts``."""
    for moment, tensors in moments.items():
        for name, tensor in tensors.items():
            parts[f"moment/{moment}/{name}"] = encode_values(tensor, mask.get(name))
    return {moment: list(tensors) for moment, tensors in moments.items()}


def decode_moments(parts: Parts, names: object, like: Mapping[str, Tensor], mask: Mask) -> dict[str, Params]:
    """Return the moments that ``encode_moments`` wrote; raise InputError if they are not of this model."""
    if not isinstance(names, dict):
        raise InputError(f"moments must be names of tensors by moment; got {short_repr(names)}")
    for named in names.values():
        if not isinstance(named, list) or not all(isinstance(name, str) and name in like for name in named):
            raise InputError(f"moments must be of parameters of the model; got {short_repr(named)}")
    moments: dict[str, Params] = {}
    for moment, named in names.items():
        kinds = {name: like_moment(moment, like[name]) for name in named}
        moments[moment] = {n: decode_values(parts, f"moment/{moment}", n, kinds[n], mask.get(n)) for n in named}
    return moments


def like_moment(moment: str, tensor: Tensor) -> Tensor:
    """Return a tensor without memory that has the shape and type of a tensor's moment."""
    return torch.empty(tensor.shape, dtype=moment_dtype(moment, tensor.dtype), device="meta")


def encode_mask(mask: Mask, parts: dict[str, bytes]) -> list[str]:
    """Return the names of a mask, for the head; add to ``parts`` the tensors that do not keep everything."""
    for name, kept in mask.items():
        if not bool(kept.all()):
            parts[f"mask/{name}"] = pack(kept)
    return list(mask)


def decode_mask(parts: Parts, names: object, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the mask with these names, as ``encode_mask`` wrote it."""
    if not isinstance(names, list):
        raise InputError(f"the names of a mask must be a list; got {short_repr(names)}")
    mask: dict[str, Tensor] = {}
    for name in names:
        if not isinstance(name, str) or name not in like or name in mask:
            raise InputError(
                f"a mask names {short_repr(name)}, which is not a tensor of the model or occurs twice; name each once"
            )
        mask[name] = decode_kept(parts, f"mask/{name}", like[name])
    return mask


def decode_kept(parts: Parts, part: str, like: Tensor) -> Tensor:
    """Remove the part with the mask of one tensor and return the mask; without such a part everything is kept."""
    if (data := parts.pop(part, None)) is None:
        return torch.ones(like.shape, dtype=torch.bool)
    if len(data) > (limit := max_mask_bytes({part: like})):
        raise InputError(f"{short_repr(part)} of the message must have at most {limit} bytes; got {len(data)}")
    return unpack(bytes(data), tuple(like.shape))
