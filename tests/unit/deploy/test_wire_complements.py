"""Complements as parts of requests: the bits of the server arrive, few bytes travel, and bad fields are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given

import fedcover as fc
from fedcover.deploy.wire import (
    ExactValues,
    KeptCopy,
    QuantizedValues,
    SentComplement,
    TrainRequest,
    decode_request,
    encode_request,
)
from fedcover.deploy.wire.complements import pack_codes, unpack_codes
from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.deploy.wire.tensors import max_mask_bytes
from fedcover.errors import InputError
from fedcover.federation.checkpoint import digest_of
from fedcover.models import MLP
from fedcover.params import Params, params_of
from fedcover.training.complements import seen
from fedcover.training.options import TrainingOptions
from fedcover.training.quantization import BITS, quantize
from fedcover.training.recipes import LocalSGD
from tests.unit.deploy.requests import requests, same_bits, seeing

SEES = TrainingOptions(complement=True)


def trained(request: TrainRequest) -> Params:
    return {name: tensor for name, tensor in request.theta.items() if name not in request.frozen}


def quantized(request: TrainRequest, bits: int) -> QuantizedValues:
    return QuantizedValues(bits, {name: quantize(tensor, bits) for name, tensor in trained(request).items()})


def check(request: TrainRequest, sent: SentComplement, values: Params, copy: Params | None = None) -> None:
    """Assert that a client sees its part of theta and these values, bit for bit."""
    decoded = decode_request(encode_request(request, sent), request.theta, request.frozen, lambda digest: copy)
    expected = seen(request.theta, request.mask, values)
    assert list(decoded.theta) == list(expected)
    assert all(same_bits(decoded.theta[name], expected[name]) for name in expected)
    assert decoded.sees
    assert decoded.keeps_copy == request.keeps_copy


@given(requests)
def test_exact_values_arrive(train_request: TrainRequest) -> None:
    request = seeing(train_request)
    check(request, ExactValues(request.theta), request.theta)
    other = {name: -tensor for name, tensor in request.theta.items()}
    check(replace(request, keeps_copy=True), ExactValues(other), other)


@given(requests)
def test_codes_are_decoded_to_the_values_of_the_server(train_request: TrainRequest) -> None:
    request = seeing(train_request)
    for bits in BITS:
        check(request, quantized(request, bits), fc.Quantized(bits).values(request.theta, {}))


@given(requests)
def test_a_kept_copy_is_used_and_not_sent(train_request: TrainRequest) -> None:
    request = replace(seeing(train_request), keeps_copy=True)
    copy = {name: tensor + 1 for name, tensor in trained(request).items()}
    check(request, KeptCopy(digest_of(copy)), {**request.theta, **copy}, copy)
    assert request.options is not None
    zeros = replace(request, options=replace(request.options, complement=False), keeps_copy=False)
    assert len(encode_request(request, KeptCopy("0" * 64))) < len(encode_request(zeros)) + 120


def test_the_bytes_of_every_kind() -> None:
    """A head of some hundred bytes, the mask, and exactly the values that are sent."""
    theta = params_of(MLP())
    rng = torch.Generator().manual_seed(0)
    mask = {name: torch.rand(t.shape, generator=rng) < 0.25 for name, t in theta.items()}
    request = TrainRequest(0, 0, 1, 0, LocalSGD(), True, theta, mask, SEES)
    zeros = len(encode_request(replace(request, options=None)))
    inside, entries = sum(int(kept.sum()) for kept in mask.values()), sum(t.numel() for t in theta.values())
    assert 4 * inside < zeros < 4 * inside + max_mask_bytes(theta) + 1000
    for sent, complement in (
        (ExactValues(theta), fc.Frozen()),
        (KeptCopy("0" * 64), fc.Kept()),
        *((quantized(request, bits), fc.Quantized(bits)) for bits in BITS),
    ):
        more = sum(complement.bytes_down(mask[n].shape, int((~mask[n]).sum())) for n in theta)
        assert 0 < len(encode_request(request, sent)) - zeros - more < 400 + 60 * len(theta)
    assert 4 * entries < len(encode_request(request, ExactValues(theta)))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 1001])
def test_codes_are_packed(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (count,), generator=torch.Generator().manual_seed(count)).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert len(packed) == -(-count * bits // 8)
    assert torch.equal(unpack_codes({"codes/w": memoryview(packed)}, "w", count, bits), codes)


THETA = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
REQUEST = TrainRequest(4, 1, 3, 5, LocalSGD(), True, THETA, {"a": torch.eye(2, 3, dtype=torch.bool)}, SEES)
"""Four entries are outside: at 4 bits 2 bytes of codes, and 16 bytes for the scales of two rows."""
CODES = quantized(REQUEST, 4)


def changed(sent: SentComplement, field: Any = None, parts: dict[str, bytes | None] | None = None) -> bytes:
    """Return a request with other fields of its complement, and with other parts or without them."""
    head, old = open_frame(encode_request(REQUEST, sent), 1 << 20)
    new: dict[str, bytes | None] = {name: bytes(part) for name, part in old.items()} | (parts or {})
    complement = {**head["complement"], **field} if isinstance(field, dict) else field or head["complement"]
    return pack_frame({**head, "complement": complement}, {n: part for n, part in new.items() if part is not None})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (changed(CODES, 7), "the complement of a request must be its fields; got 7"),
        (changed(CODES, [1]), "must be its fields; got a list"),
        (changed(CODES, {"kind": "zeros"}), "the unknown kind 'zeros'"),
        (changed(CODES, {"kind": []}), "the unknown kind a list"),
        (changed(CODES, {"more": 1}), "unexpected field 'more' in the complement"),
        (changed(CODES, {"bits": 3}), "bits of the message must be one of 2, 4, 8; got 3"),
        (changed(CODES, {"bits": True}), "bits of the message must be a whole number"),
        (changed(CODES, {"bits": 2}), "2 bytes of codes/a, not 1"),
        (changed(CODES, {"bits": 2**40}), "must be one of"),
        (changed(CODES, None, {"codes/a": None}), "the message has no codes/a"),
        (changed(CODES, None, {"codes/a": b"123"}), "3 bytes of codes/a, not 2"),
        (changed(CODES, None, {"scale/a": None}), "the message has no scale/a"),
        (changed(CODES, None, {"scale/a": b"1234" * 5}), "20 bytes of scale/a, not 16"),
        (changed(CODES, None, {"codes/b": b""}), "unexpected field 'codes/b'"),
        (changed(CODES, None, {"outside/a": b"1234" * 4}), "unexpected field 'outside/a'"),
        (changed(ExactValues(THETA), None, {"outside/a": None}), "the message has no outside/a"),
        (changed(ExactValues(THETA), None, {"outside/a": b"1234" * 5}), "20 bytes of outside/a, not 16"),
        (changed(ExactValues(THETA), {"bits": 4}), "unexpected field 'bits' in the complement"),
        (changed(KeptCopy("0" * 64)), "copy of the model is missing, or is not the one that the server has"),
        (changed(KeptCopy("0" * 64), {"digest": "0" * 63}), "digest of the message must be a SHA-256"),
        (changed(KeptCopy("0" * 64), {"digest": None}), "digest of the message must be a SHA-256; got None"),
    ],
)  # fmt: skip
def test_invalid_complements_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        decode_request(data, THETA)
    assert "\n" not in str(caught.value)


def test_codes_beyond_the_last_entry_are_refused() -> None:
    three = replace(REQUEST, mask={"a": torch.tensor([[True, True, True], [False, False, False]])})
    head, parts = open_frame(encode_request(three, quantized(three, 2)), 1 << 20)
    data = pack_frame(head, {**{n: bytes(p) for n, p in parts.items()}, "codes/a": b"\xff"})
    with pytest.raises(InputError, match="more codes than entries"):
        decode_request(data, THETA)


def test_options_and_complement_must_agree() -> None:
    """Or a client would train at zeros where the server counts on values."""
    plain = replace(REQUEST, options=None)
    for request, sent, why in (
        (REQUEST, None, "sees values outside its mask, but the request has no complement"),
        (plain, ExactValues(THETA), "sees zeros outside its mask, but the request has a complement"),
        (replace(plain, keeps_copy=True), None, "keeps a copy of the model, which it does not see"),
    ):
        with pytest.raises(InputError, match=why):
            encode_request(request, sent)
    for other, sent in ((REQUEST, ExactValues(THETA)), (plain, None)):
        head, parts = open_frame(encode_request(other, sent), 1 << 20)
        head["options"] = {**(head["options"] or open_frame(changed(CODES), 1 << 20)[0]["options"])}
        head["options"]["complement"] = other is plain
        with pytest.raises(InputError, match="send one exactly if the client sees it"):
            decode_request(
                pack_frame(head, {n: bytes(p) for n, p in parts.items() if "outside" not in n or sent}), THETA
            )


def test_tensors_that_are_not_trained_are_the_clients_own() -> None:
    """Unless a complement gives them other values."""
    request = replace(REQUEST, frozen=("a",))
    for sent in (ExactValues(THETA), quantized(request, 4), KeptCopy("0" * 64)):
        assert not [name for name in open_frame(encode_request(request, sent), 1 << 20)[1] if name.endswith("/a")][1:]
    other = {"a": THETA["a"] * 2, "b": THETA["b"]}
    check(request, ExactValues(other), other)
    check(request, ExactValues(THETA), THETA)
