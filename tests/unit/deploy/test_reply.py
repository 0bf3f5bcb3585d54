"""Replies: a valid one is the client's update, and every other is rejected with a reason."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

import fedcover as fc
from fedcover.aggregation.base import ClientUpdate
from fedcover.aggregation.region_mean import RegionSum
from fedcover.deploy.wire import (
    InvalidReplyError,
    Limits,
    PendingRequest,
    TrainRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.errors import InputError
from fedcover.masks.encoding import pack
from fedcover.training.options import Regrow, TrainingOptions
from fedcover.training.recipes import LocalAdam, LocalSGD
from tests.unit.deploy.requests import reply_to, requests, same_bits, same_masks

FREE = Limits(norm=math.inf)


@given(requests)
def test_a_reply_is_decoded_as_it_was_encoded(train_request: TrainRequest) -> None:
    update = reply_to(train_request)
    decoded = decode_reply(encode_reply(update, train_request), PendingRequest.of(train_request, update.examples), FREE)
    assert (decoded.client, decoded.examples, decoded.train_loss) == (update.client, update.examples, update.train_loss)
    assert decoded.finite is True
    assert all(same_bits(decoded.theta[name], update.theta[name]) for name in train_request.theta)
    assert same_masks(decoded.mask, update.mask)
    assert (decoded.mask is train_request.mask) == (
        train_request.options is None or train_request.options.regrow is None
    )
    assert (decoded.report is None) == (update.report is None)
    if decoded.report is not None and update.report is not None:
        assert all(same_bits(decoded.report[name], update.report[name]) for name in train_request.theta)


@given(requests)
def test_values_outside_the_mask_are_not_sent(train_request: TrainRequest) -> None:
    update = reply_to(train_request)
    junk = {}
    for name, tensor in update.theta.items():
        kept = update.mask.get(name, torch.tensor(True))
        junk[name] = torch.where(kept, tensor, torch.full_like(tensor, float("nan")))
    assert encode_reply(replace(update, theta=junk), train_request) == encode_reply(update, train_request)


def test_replies_are_averaged_as_the_updates_are() -> None:
    theta = {"w": torch.randn(5, 4)}
    masks = [{"w": torch.rand(5, 4) < 0.5} for _ in range(3)]
    sent = [TrainRequest(i, i, 1, 0, LocalSGD(), False, theta, mask) for i, mask in enumerate(masks)]
    updates = [reply_to(train_request, seed) for seed, train_request in enumerate(sent)]
    totals = RegionSum(theta), RegionSum(theta)
    totals[0].add_together(updates)
    totals[1].add_together(
        [decode_reply(encode_reply(u, o), PendingRequest.of(o), FREE) for u, o in zip(updates, sent, strict=True)]
    )
    assert torch.equal(totals[0].result()["w"], totals[1].result()["w"])


def test_counts_of_half_precision_are_sent_whole() -> None:
    theta = {"w": torch.ones(3, dtype=torch.bfloat16)}
    recipe, kept = LocalAdam(keep_moments=True), {"w": torch.tensor([True, False, True])}
    moments = {"mean": theta, "square": theta, "count": {"w": torch.tensor([257.0, 0.0, 1001.0])}}
    train_request = TrainRequest(4, 1, 5, 0, recipe, False, theta, kept, TrainingOptions(moments=moments))
    received = decode_request(encode_request(train_request), theta)
    assert received.options is not None
    assert torch.equal(received.options.moments["count"]["w"], moments["count"]["w"])
    update = replace(reply_to(train_request), moments=moments)
    decoded = decode_reply(encode_reply(update, train_request), PendingRequest.of(train_request), FREE)
    assert decoded.moments is not None
    assert torch.equal(decoded.moments["count"]["w"], moments["count"]["w"])


THETA = {"a": torch.ones(2, 3), "b": torch.ones(4)}
MASK = {"a": torch.tensor([[True, False, True], [False, False, True]])}
PLAIN = TrainRequest(4, 1, 5, 0, LocalSGD(), True, THETA, MASK)
REGROW = replace(PLAIN, options=TrainingOptions(regrow=Regrow(0.5)))
REPORT = replace(PLAIN, options=TrainingOptions(report=True))
KEPT = replace(PLAIN, recipe=LocalSGD(keep_moments=True))
ADAM = replace(PLAIN, recipe=LocalAdam(keep_moments=True))
FROZEN = replace(KEPT, frozen=("b",))

Change = Callable[[dict[str, Any], dict[str, bytes]], None]


def changed(train_request: TrainRequest, change: Change) -> bytes:
    """Return a valid reply with something changed in its head or its parts."""
    head, views = open_frame(encode_reply(reply_to(train_request), train_request), 1 << 20)
    parts = {name: bytes(view) for name, view in views.items()}
    change(head, parts)
    return pack_frame(head, parts)


def head(**values: Any) -> Change:
    return lambda head, parts: head.update(values)


def part(name: str, data: bytes) -> Change:
    return lambda head, parts: parts.update({name: data})


def drop(name: str) -> Change:
    def take(head: dict[str, Any], parts: dict[str, bytes]) -> None:
        head.pop(name, None)
        parts.pop(name, None)

    return take


def only(moment: str, name: str) -> Change:
    """Leave out all tensors of a moment but one."""

    def leave(head: dict[str, Any], parts: dict[str, bytes]) -> None:
        for other in set(head["moments"][moment]) - {name}:
            del parts[f"moment/{moment}/{other}"]
        head["moments"][moment] = [name]

    return leave


def more(moment: str, name: str) -> Change:
    """Add a tensor of zeros to a moment."""

    def add(head: dict[str, Any], parts: dict[str, bytes]) -> None:
        head["moments"][moment].append(name)
        parts[f"moment/{moment}/{name}"] = bytes(4 * THETA[name].numel())

    return add


def floats(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes()


TABLE = [["a", "float32", [2, 3]], ["b", "float32", [4]]]


@pytest.mark.parametrize(
    ("train_request", "change", "why"),
    [
        (PLAIN, head(round=3), "round 3, not 5"),
        (PLAIN, head(round="5"), "round of the message must be a whole number; got '5'"),
        (PLAIN, head(client=1), "for another client"),
        (PLAIN, head(client=True), "client of the message must be a whole number"),
        (PLAIN, head(kind="request"), "'request', not a reply"),
        (PLAIN, head(kind={"a": [1]}), "a dict, not a reply"),
        (PLAIN, drop("kind"), "None, not a reply"),
        (PLAIN, drop("round"), "round of the message must be a whole number; it is missing"),
        (PLAIN, drop("theta/a"), "the message has no theta/a"),
        (PLAIN, drop("tensors"), "it trained another model: its tensors are not listed"),
        (PLAIN, head(tensors=TABLE[:1]), "another model: it does not have 'b'"),
        (PLAIN, head(tensors=[*TABLE, ["c", "float32", []]]), "another model: it has 'c'"),
        (PLAIN, head(tensors=[*TABLE, *TABLE]), "it lists a tensor twice"),
        (PLAIN, head(tensors=[["a", "float32", [3, 2]], TABLE[1]]), r"shape \(3, 2\) there and \(2, 3\) here"),
        (PLAIN, head(tensors=[["a", "float64", [2, 3]], TABLE[1]]), "'a' has the type float64 there and float32 here"),
        (PLAIN, head(tensors=[["a", {}, 7], TABLE[1]]), "'a' has the type a dict there and float32 here"),
        (PLAIN, head(more=1), "unexpected field 'more'"),
        (PLAIN, part("theta/c", b""), "unexpected field 'theta/c'"),
        (PLAIN, part("theta/a", floats(1, 2)), "has 8 bytes of theta/a, not 12"),
        (PLAIN, part("theta/a", floats(*range(6))), "has 24 bytes of theta/a, not 12"),
        (PLAIN, part("theta/a", floats(1, math.nan, 2)), "^its trained values are not all finite$"),
        (PLAIN, part("theta/b", floats(1, 2, 3, math.inf)), "^its trained values are not all finite$"),
        (PLAIN, head(examples=0), "examples of the message must be a whole number of 1 or more; got 0"),
        (PLAIN, head(examples=2.0), "examples of the message must be a whole number of 1 or more; got 2.0"),
        (PLAIN, head(examples=999), "it trained on 999 examples, but has [0-9]+ by the client registry"),
        (PLAIN, head(train_loss=None), "^its training loss is not finite$"),
        (PLAIN, head(train_loss="0.1"), "train_loss of the message must be a finite number; got '0.1'"),
        (PLAIN, head(mask=["a"]), "a mask, which was not requested"),
        (PLAIN, part("mask/a", pack(MASK["a"])), "unexpected field 'mask/a'"),
        (PLAIN, head(report=TABLE), "a gradient report, which was not requested"),
        (PLAIN, part("report/a", bytes(24)), "unexpected field 'report/a'"),
        (REGROW, drop("mask"), "names of a mask must be a list"),
        (REGROW, head(mask=[]), "the tensors of the request's mask"),
        (REGROW, head(mask=["a", "b"]), "the tensors of the request's mask"),
        (REGROW, head(mask=["a", "a"]), "a mask names 'a'"),
        (REGROW, drop("mask/a"), "its mask keeps 6 entries of 'a', not 3 as before"),
        (REGROW, part("mask/a", b"\x01\x01"), "its mask keeps 1 entries of 'a', not 3 as before"),
        (REGROW, part("mask/a", b"\x09"), "not a known encoding"),
        (REGROW, part("mask/a", b""), "not a known encoding"),
        (REGROW, part("mask/a", b"\x03" + b"\x80" * 50), "at most 2 bytes; got 51"),
        (REGROW, part("mask/a", b"\x03\xff"), "a packed mask does not fit"),
        (REPORT, drop("report"), "no gradient report"),
        (REPORT, drop("report/a"), "the message has no report/a"),
        (REPORT, part("report/b", floats(1, 2)), "has 8 bytes of report/b, not 16"),
        (REPORT, part("report/b", floats(1, 2, 3, -1)), "gradient report has values that are negative"),
        (REPORT, part("report/b", floats(1, 2, 3, math.inf)), "gradient report has values that are negative"),
        (REPORT, head(report=TABLE[:1]), "gradient report is of another model: it does not have 'b'"),
        (PLAIN, head(moments={}), "moments, which were not requested"),
        (KEPT, drop("moments"), "moments must be names of tensors by moment; got None"),
        (KEPT, head(moments={"velocity": ["c"]}), "moments must be of parameters of the model"),
        (KEPT, head(moments={}), "other moments than velocity"),
        (KEPT, head(moments={"velocity": []}), "moment 'velocity' is not of exactly the tensors that were trained"),
        (KEPT, only("velocity", "b"), "moment 'velocity' is not of exactly the tensors that were trained"),
        (ADAM, only("mean", "a"), "moment 'mean' is not of exactly the tensors that were trained"),
        (ADAM, part("moment/square/b", floats(1, 2, 3, -1)), "^its moment 'square' has negative values$"),
        (ADAM, part("moment/count/b", floats(1, 2, -3, 1)), "^its moment 'count' has negative values$"),
        (FROZEN, more("velocity", "b"), "moment 'velocity' is not of exactly the tensors that were trained"),
        (KEPT, drop("moment/velocity/a"), "the message has no moment/velocity/a"),
        (KEPT, part("moment/velocity/a", floats(1, 2)), "has 8 bytes of moment/velocity/a, not 12"),
        (KEPT, part("moment/velocity/b", floats(1, 2, 3, math.inf)), "^its moments are not all finite$"),
    ],
)  # fmt: skip
def test_an_invalid_reply_is_rejected_with_its_reason(train_request: TrainRequest, change: Change, why: str) -> None:
    sent = PendingRequest.of(train_request, reply_to(train_request).examples)
    decode_reply(changed(train_request, lambda head, parts: None), sent, Limits())
    with pytest.raises(InvalidReplyError, match=why) as caught:
        decode_reply(changed(train_request, change), sent, Limits())
    assert str(caught.value) == caught.value.reason
    assert "\n" not in caught.value.reason


def test_what_is_not_a_reply_is_rejected() -> None:
    valid = encode_reply(reply_to(PLAIN), PLAIN)
    for data, why in (
        (b"", "not a fedcover frame"),
        (b"fedcover-wire-7\n" + valid[16:], "version 7"),
        (valid[:-1], "damaged"),
        (encode_request(PLAIN), "'request', not a reply"),
        (valid + bytes(100_000), "over the limit"),
    ):
        with pytest.raises(InvalidReplyError, match=why):
            decode_reply(data, PendingRequest.of(PLAIN), Limits())


def test_a_diverged_client_is_rejected_as_any_engine_rejects_it() -> None:
    update = ClientUpdate(4, {"a": THETA["a"] * math.nan, "b": THETA["b"]}, MASK, 3, math.nan)
    with pytest.raises(InvalidReplyError, match=r"^its trained values are not all finite$"):
        decode_reply(encode_reply(update, PLAIN), PendingRequest.of(PLAIN), Limits())


def moved(theta: Tensor, by: Tensor, mask: dict[str, Tensor] | None = None) -> tuple[bytes, PendingRequest]:
    train_request = TrainRequest(0, 0, 1, 0, LocalSGD(), False, {"w": theta}, mask or {})
    return encode_reply(
        ClientUpdate(0, {"w": theta + by}, train_request.mask, 1, 0.0), train_request
    ), PendingRequest.of(train_request)


def test_a_change_too_large_is_rejected() -> None:
    theta = torch.tensor([3.0, 4.0, 1e6])
    mask = {"w": torch.tensor([True, True, False])}
    for size, limit, fine in ((49.9, 10, True), (50.1, 10, False), (50.1, 11, True), (5e20, math.inf, True)):
        data, sent = moved(theta, torch.tensor([size, 0.0, 0.0]), mask)
        if fine:
            decode_reply(data, sent, Limits(limit))
        else:
            with pytest.raises(InvalidReplyError, match=r"its change is 10 times its size, over the limit of 10"):
                decode_reply(data, sent, Limits(limit))


def test_a_change_from_nothing_is_measured_by_one() -> None:
    for size, fine in ((9.9, True), (10.1, False)):
        data, sent = moved(torch.zeros(2), torch.tensor([size, 0.0]))
        if fine:
            decode_reply(data, sent, Limits())
        else:
            with pytest.raises(InvalidReplyError, match="over the limit"):
                decode_reply(data, sent, Limits())


def test_a_change_too_large_to_be_squared_is_rejected() -> None:
    big = torch.full((2,), 1e300, dtype=torch.float64)
    for theta in (torch.ones(2, dtype=torch.float64), big / 10):
        data, sent = moved(theta, big)
        with pytest.raises(InvalidReplyError, match="over the limit"):
            decode_reply(data, sent, Limits())
        decode_reply(data, sent, FREE)


def test_examples_are_not_compared_without_a_registry() -> None:
    data = changed(PLAIN, head(examples=12345))
    assert decode_reply(data, PendingRequest.of(PLAIN), Limits()).examples == 12345


@pytest.mark.parametrize("norm", [0, -1, math.nan, "10", True, None])
def test_limits_are_positive(norm: Any) -> None:
    with pytest.raises(InputError, match="norm must be a positive number, or infinity for no limit"):
        Limits(norm)


def test_what_was_read_can_be_written_to() -> None:
    """The message's own memory is not shared: aggregation may work in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = decode_reply(encode_reply(reply_to(REPORT), REPORT), PendingRequest.of(REPORT), Limits())
    assert update.report is not None
    for tensor in (*update.theta.values(), *update.report.values()):
        tensor.add_(1)
    assert isinstance(InvalidReplyError("why"), fc.errors.FedcoverError)
