"""What a request carries of the entries outside its mask, if its client sees them (``training/complements.py``).

    values      exactly, as ``outside/NAME``
    codes       in few bits, as ``codes/NAME``, with the low and the step of each row as ``scale/NAME``
    copy        nothing: the client has them in its own copy of the model, which the request names by its digest

Each is decoded to the bits that the server has. A tensor that the mask keeps whole has nothing outside. Values of
tensors that are not trained are the client's own, as in any request.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedcover.deploy.wire.fields import SAME_VERSION, take_int
from fedcover.deploy.wire.frame import short_repr
from fedcover.deploy.wire.tensors import Parts, decode_values, encode_values
from fedcover.errors import InputError
from fedcover.params import Mask, Params
from fedcover.training.quantization import BITS, Codes, num_rows, quantize

FindCopy = Callable[[str], Params | None]
"""Returns a client's copy of the trained tensors by its digest; None if it does not have that one."""
NO_COPY = "the client's copy of the model is missing, or is not the one that the server has; the server sends it again"


@dataclass(frozen=True, eq=False)
class RequestParts:
    """What a client needs to read the entries outside a mask."""

    parts: Parts
    """The parts of the message that are not yet read."""
    like: Params
    """The parameters of the client's own model."""
    mask: Mask
    frozen: tuple[str, ...]
    """The names of the tensors that are not trained."""
    find_copy: FindCopy


Outside = Callable[[str], Tensor]
"""Returns a tensor by name, whose values count outside the mask."""


class SentComplement(ABC):
    """The base of what requests carry of the entries outside their masks."""

    kind: ClassVar[str]

    @abstractmethod
    def encode(self, theta: Params, outside: Mask, frozen: tuple[str, ...], parts: dict[str, bytes]) -> dict[str, Any]:
        """Return fields of the head, and add tensors to ``parts``.

        Args:
            theta: The parameters of the request.
            outside: The entries outside the mask, of tensors that have some.
            frozen: The names of the tensors that are not trained.
            parts: The parts of the message.
        """

    @classmethod
    @abstractmethod
    def decode(cls, fields: dict[str, Any], request: RequestParts) -> Outside:
        """Return the values outside the mask that ``encode`` wrote; raise InputError if the fields are not valid."""


@dataclass(frozen=True, eq=False)
class ExactValues(SentComplement):
    """Values that are sent as they are; those of a tensor that is not trained only if they are not its own."""

    values: Params
    kind = "values"

    def encode(self, theta: Params, outside: Mask, frozen: tuple[str, ...], parts: dict[str, bytes]) -> dict[str, Any]:
        """Return no fields."""
        for name, there in outside.items():
            if name not in frozen or not torch.equal(self.values[name][there], theta[name][there]):
                parts[f"outside/{name}"] = encode_values(self.values[name], there)
        return {}

    @classmethod
    def decode(cls, fields: dict[str, Any], request: RequestParts) -> Outside:
        """Return the values that were sent."""

        def outside(name: str) -> Tensor:
            like = request.like[name]
            if name in request.frozen and f"outside/{name}" not in request.parts:
                return like
            return decode_values(request.parts, "outside", name, like, ~request.mask[name])

        return outside


@dataclass(frozen=True, eq=False)
class QuantizedValues(SentComplement):
    """Values in few bits; a client quantizes tensors that are not trained itself."""

    bits: int
    codes: Mapping[str, Codes]
    """The codes of all tensors that are trained."""
    kind = "codes"

    def encode(self, theta: Params, outside: Mask, frozen: tuple[str, ...], parts: dict[str, bytes]) -> dict[str, Any]:
        """Return the number of bits."""
        for name, there in outside.items():
            if name not in frozen:
                codes, low, step = self.codes[name]
                parts[f"codes/{name}"] = pack_codes(codes[there], self.bits)
                parts[f"scale/{name}"] = encode_values(torch.stack([low, step]), None)
        return {"bits": self.bits}

    @classmethod
    def decode(cls, fields: dict[str, Any], request: RequestParts) -> Outside:
        """Return the values that the codes stand for."""
        bits = take_int(fields, "bits")
        if bits not in BITS:
            raise InputError(f"bits of the message must be one of {', '.join(map(str, BITS))}; got {bits}")

        def outside(name: str) -> Tensor:
            like, there = request.like[name], ~request.mask[name]
            if name in request.frozen:
                return quantize(like, bits).values()
            codes = torch.zeros(like.shape, dtype=torch.uint8)
            codes[there] = unpack_codes(request.parts, name, int(there.sum()), bits)
            scale = torch.empty(2, num_rows(like.shape), dtype=like.dtype, device="meta")
            return Codes(codes, *decode_values(request.parts, "scale", name, scale, None)).values()

        return outside


@dataclass(frozen=True, eq=False)
class KeptCopy(SentComplement):
    """A copy that the client has: only its digest is sent."""

    digest: str
    kind = "copy"

    def encode(self, theta: Params, outside: Mask, frozen: tuple[str, ...], parts: dict[str, bytes]) -> dict[str, Any]:
        """Return the digest."""
        return {"digest": self.digest}

    @classmethod
    def decode(cls, fields: dict[str, Any], request: RequestParts) -> Outside:
        """Return the values of the client's copy."""
        digest = fields.pop("digest", None)
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise InputError(f"digest of the message must be a SHA-256; got {short_repr(digest)}; {SAME_VERSION}")
        if (copy := request.find_copy(digest)) is None:
            raise InputError(NO_COPY)
        return lambda name: request.like[name] if name in request.frozen else copy[name]


KINDS: dict[str, type[SentComplement]] = {each.kind: each for each in (ExactValues, QuantizedValues, KeptCopy)}


def encode_complement(
    sent: SentComplement, theta: Params, mask: Mask, frozen: tuple[str, ...], parts: dict[str, bytes]
) -> dict[str, Any]:
    """Return what a request carries of the entries outside its mask, as a field of the head; add to ``parts``."""
    outside = {name: ~kept.cpu() for name, kept in mask.items() if not bool(kept.all())}
    return {"kind": sent.kind, **sent.encode(theta, outside, frozen, parts)}


def decode_complement(field: object, theta: Params, request: RequestParts) -> Params:
    """Return what a client sees: theta inside its mask, and outside it what the field of a request contains.

    Raises:
        InputError: If the field or its parts are not valid, or name a copy that the client does not have.
    """
    if not isinstance(field, dict):
        raise InputError(f"the complement of a request must be its fields; got {short_repr(field)}; {SAME_VERSION}")
    fields = dict(field)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"the complement of a request has the unknown kind {short_repr(kind)}; {SAME_VERSION}")
    outside = KINDS[kind].decode(fields, request)
    if fields:
        raise InputError(f"unexpected field {short_repr(next(iter(fields)))} in the complement; {SAME_VERSION}")
    seen = dict(theta)
    for name, kept in request.mask.items():
        if not bool(kept.all()):
            seen[name] = torch.where(kept, theta[name], outside(name))
    return seen


def pack_codes(codes: Tensor, bits: int) -> bytes:
    """Return a row of codes, several in one byte, the first in its lowest bits.

    >>> pack_codes(torch.tensor([1, 2, 15], dtype=torch.uint8), 4).hex()
    '210f'
    """
    each = 8 // bits
    padded = np.zeros(-(-len(codes) // each) * each, np.uint8)
    padded[: len(codes)] = codes.cpu().numpy()
    shifted = padded.reshape(-1, each) << np.arange(0, 8, bits, dtype=np.uint8)
    packed: np.ndarray = np.bitwise_or.reduce(shifted, axis=1)
    return packed.tobytes()


def unpack_codes(parts: Parts, name: str, count: int, bits: int) -> Tensor:
    """Remove the part with a tensor's codes and return them as a row; raise InputError if it is not valid."""
    data = parts.pop(f"codes/{name}", None)
    if data is None:
        raise InputError(f"the message has no codes/{name}; send it")
    if len(data) != (expected := -(-count * bits // 8)):
        raise InputError(f"the message has {len(data)} bytes of codes/{name}, not {expected}; send one code per entry")
    packed = np.frombuffer(data, np.uint8)
    codes = packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8(2**bits - 1)
    codes = codes.reshape(-1)
    if codes[count:].any():
        raise InputError(f"codes/{name} of the message have more codes than entries; send one code per entry")
    return torch.from_numpy(codes[:count])
