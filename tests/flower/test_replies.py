"""Answers: a sound one is the client's update, and every other is rejected with a reason."""

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
from fedcover.aggregation.region_mean import ClientUpdate, RegionSum
from fedcover.deploy.wire import Limits, Rejected, Sent, TrainRequest, encode_reply, encode_request, read_answer
from fedcover.deploy.wire.frame import open_frame, pack_frame
from fedcover.errors import InputError
from fedcover.masks.encoding import pack
from fedcover.training.options import Regrow, TrainingOptions
from fedcover.training.task import LocalSGD
from tests.flower.orders import answer_to, orders, same_bits, same_masks

FREE = Limits(norm=math.inf)


@given(orders)
def test_an_answer_comes_out_as_it_went_in(order: TrainRequest) -> None:
    update = answer_to(order)
    found = read_answer(encode_reply(update, order), Sent.of(order, update.examples), FREE)
    assert (found.client, found.examples, found.train_loss) == (update.client, update.examples, update.train_loss)
    assert found.finite is True
    assert all(same_bits(found.theta[name], update.theta[name]) for name in order.theta)
    assert same_masks(found.mask, update.mask)
    assert (found.mask is order.mask) == (order.options is None or order.options.regrow is None)
    assert (found.report is None) == (update.report is None)
    if found.report is not None and update.report is not None:
        assert all(same_bits(found.report[name], update.report[name]) for name in order.theta)


@given(orders)
def test_what_lies_outside_the_mask_does_not_travel(order: TrainRequest) -> None:
    update = answer_to(order)
    junk = {}
    for name, tensor in update.theta.items():
        kept = update.mask.get(name, torch.tensor(True))
        junk[name] = torch.where(kept, tensor, torch.full_like(tensor, float("nan")))
    assert encode_reply(replace(update, theta=junk), order) == encode_reply(update, order)


def test_answers_are_averaged_as_the_updates_are() -> None:
    theta = {"w": torch.randn(5, 4)}
    masks = [{"w": torch.rand(5, 4) < 0.5} for _ in range(3)]
    made = [TrainRequest(i, i, 1, 0, LocalSGD(), False, theta, mask) for i, mask in enumerate(masks)]
    updates = [answer_to(order, seed) for seed, order in enumerate(made)]
    totals = RegionSum(theta), RegionSum(theta)
    totals[0].add_together(updates)
    totals[1].add_together(
        [read_answer(encode_reply(u, o), Sent.of(o), FREE) for u, o in zip(updates, made, strict=True)]
    )
    assert torch.equal(totals[0].mean()["w"], totals[1].mean()["w"])


THETA = {"a": torch.ones(2, 3), "b": torch.ones(4)}
MASK = {"a": torch.tensor([[True, False, True], [False, False, True]])}
PLAIN = TrainRequest(4, 1, 5, 0, LocalSGD(), True, THETA, MASK)
REGROW = replace(PLAIN, options=TrainingOptions(regrow=Regrow(0.5)))
REPORT = replace(PLAIN, options=TrainingOptions(report=True))

Change = Callable[[dict[str, Any], dict[str, bytes]], None]


def changed(order: TrainRequest, change: Change) -> bytes:
    """A sound answer with something changed in its head or its parts."""
    head, views = open_frame(encode_reply(answer_to(order), order), 1 << 20)
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


def floats(*values: float) -> bytes:
    return torch.tensor(values, dtype=torch.float32).numpy().tobytes()


TABLE = [["a", "float32", [2, 3]], ["b", "float32", [4]]]


@pytest.mark.parametrize(
    ("order", "change", "why"),
    [
        (PLAIN, head(round=3), "it answers round 3, not 5"),
        (PLAIN, head(round="5"), "round of the message must be a whole number; got '5'"),
        (PLAIN, head(client=1), "it answers an order that another client got"),
        (PLAIN, head(client=True), "client of the message must be a whole number"),
        (PLAIN, head(kind="order"), "it sends 'order', not an answer"),
        (PLAIN, head(kind={"a": [1]}), "it sends a dict, not an answer"),
        (PLAIN, drop("kind"), "it sends None, not an answer"),
        (PLAIN, drop("round"), "round of the message must be a whole number; it is missing"),
        (PLAIN, drop("theta/a"), "the message has no theta/a"),
        (PLAIN, drop("tensors"), "it trained another model: its tensors are not listed"),
        (PLAIN, head(tensors=TABLE[:1]), "another model: it has no 'b', which the model here has"),
        (PLAIN, head(tensors=[*TABLE, ["c", "float32", []]]), "another model: it has 'c'"),
        (PLAIN, head(tensors=[*TABLE, *TABLE]), "it lists a tensor twice"),
        (PLAIN, head(tensors=[["a", "float32", [3, 2]], TABLE[1]]), r"shape \(3, 2\) there and \(2, 3\) here"),
        (PLAIN, head(tensors=[["a", "float64", [2, 3]], TABLE[1]]), "'a' has the type float64 there and float32 here"),
        (PLAIN, head(tensors=[["a", {}, 7], TABLE[1]]), "'a' has the type a dict there and float32 here"),
        (PLAIN, head(more=1), "'more', which nobody asked for"),
        (PLAIN, part("theta/c", b""), "'theta/c', which nobody asked for"),
        (PLAIN, part("theta/a", floats(1, 2)), "has 8 bytes of theta/a, not 12"),
        (PLAIN, part("theta/a", floats(*range(6))), "has 24 bytes of theta/a, not 12"),
        (PLAIN, part("theta/a", floats(1, math.nan, 2)), "^its trained values are not all finite$"),
        (PLAIN, part("theta/b", floats(1, 2, 3, math.inf)), "^its trained values are not all finite$"),
        (PLAIN, head(examples=0), "examples of the message must be a whole number of 1 or more; got 0"),
        (PLAIN, head(examples=2.0), "examples of the message must be a whole number of 1 or more; got 2.0"),
        (PLAIN, head(examples=999), "it trained on 999 examples, but has [0-9]+ by the census"),
        (PLAIN, head(train_loss=None), "train_loss of the message must be a finite number; got None"),
        (PLAIN, head(train_loss="0.1"), "train_loss of the message must be a finite number; got '0.1'"),
        (PLAIN, head(mask=["a"]), "it sends a mask, though none was asked for"),
        (PLAIN, part("mask/a", pack(MASK["a"])), "'mask/a', which nobody asked for"),
        (PLAIN, head(report=TABLE), "it sends a report, though none was asked for"),
        (PLAIN, part("report/a", bytes(24)), "'report/a', which nobody asked for"),
        (REGROW, drop("mask"), "the names of a mask are None"),
        (REGROW, head(mask=[]), "its mask is not of the tensors that were sent with one"),
        (REGROW, head(mask=["a", "b"]), "its mask is not of the tensors that were sent with one"),
        (REGROW, head(mask=["a", "a"]), "a mask names 'a', which is no tensor or is there twice"),
        (REGROW, drop("mask/a"), "its mask keeps 6 entries of 'a', not 3 as before"),
        (REGROW, part("mask/a", b"\x01\x01"), "its mask keeps 1 entries of 'a', not 3 as before"),
        (REGROW, part("mask/a", b"\x09"), "no known encoding"),
        (REGROW, part("mask/a", b""), "no known encoding"),
        (REGROW, part("mask/a", b"\x03" + b"\x80" * 50), "has 51 bytes; a packed mask has at most 2"),
        (REGROW, part("mask/a", b"\x03\xff"), "a packed mask does not fit"),
        (REPORT, drop("report"), "it sends no report, though one was asked for"),
        (REPORT, drop("report/a"), "the message has no report/a"),
        (REPORT, part("report/b", floats(1, 2)), "has 8 bytes of report/b, not 16"),
        (REPORT, part("report/b", floats(1, 2, 3, -1)), "its report has values that are negative or not finite"),
        (REPORT, part("report/b", floats(1, 2, 3, math.inf)), "its report has values that are negative or not finite"),
        (REPORT, head(report=TABLE[:1]), "its report is of another model: it has no 'b'"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_answer_is_said(order: TrainRequest, change: Change, why: str) -> None:
    sent = Sent.of(order, answer_to(order).examples)
    read_answer(changed(order, lambda head, parts: None), sent, Limits())
    with pytest.raises(Rejected, match=why) as caught:
        read_answer(changed(order, change), sent, Limits())
    assert str(caught.value) == caught.value.reason
    assert "\n" not in caught.value.reason


def test_what_is_no_answer_at_all_is_rejected() -> None:
    sound = encode_reply(answer_to(PLAIN), PLAIN)
    for data, why in (
        (b"", "no fedcover frame"),
        (b"fedcover-wire-7\n" + sound[16:], "the peer speaks version 7"),
        (sound[:-1], "damaged"),
        (encode_request(PLAIN), "it sends 'order', not an answer"),
        (sound + bytes(100_000), "over the limit"),
    ):
        with pytest.raises(Rejected, match=why):
            read_answer(data, Sent.of(PLAIN), Limits())


def test_a_diverged_client_is_rejected_as_any_engine_rejects_it() -> None:
    update = ClientUpdate(4, {"a": THETA["a"] * math.nan, "b": THETA["b"]}, MASK, 3, math.nan)
    with pytest.raises(Rejected, match=r"^its trained values are not all finite$"):
        read_answer(encode_reply(update, PLAIN), Sent.of(PLAIN), Limits())


def moved(theta: Tensor, by: Tensor, mask: dict[str, Tensor] | None = None) -> tuple[bytes, Sent]:
    order = TrainRequest(0, 0, 1, 0, LocalSGD(), False, {"w": theta}, mask or {})
    return encode_reply(ClientUpdate(0, {"w": theta + by}, order.mask, 1, 0.0), order), Sent.of(order)


def test_a_change_too_large_is_rejected() -> None:
    theta = torch.tensor([3.0, 4.0, 1e6])
    mask = {"w": torch.tensor([True, True, False])}
    for size, limit, fine in ((49.9, 10, True), (50.1, 10, False), (50.1, 11, True), (5e20, math.inf, True)):
        data, sent = moved(theta, torch.tensor([size, 0.0, 0.0]), mask)
        if fine:
            read_answer(data, sent, Limits(limit))
        else:
            with pytest.raises(Rejected, match=r"its change is 10 times its size, over the limit of 10"):
                read_answer(data, sent, Limits(limit))


def test_a_change_from_nothing_is_measured_by_one() -> None:
    for size, fine in ((9.9, True), (10.1, False)):
        data, sent = moved(torch.zeros(2), torch.tensor([size, 0.0]))
        if fine:
            read_answer(data, sent, Limits())
        else:
            with pytest.raises(Rejected, match="over the limit"):
                read_answer(data, sent, Limits())


def test_a_change_too_large_to_be_squared_is_rejected() -> None:
    big = torch.full((2,), 1e300, dtype=torch.float64)
    for theta in (torch.ones(2, dtype=torch.float64), big / 10):
        data, sent = moved(theta, big)
        with pytest.raises(Rejected, match="over the limit"):
            read_answer(data, sent, Limits())
        read_answer(data, sent, FREE)


def test_a_census_that_nobody_took_is_not_compared_with() -> None:
    data = changed(PLAIN, head(examples=12345))
    assert read_answer(data, Sent.of(PLAIN), Limits()).examples == 12345


@pytest.mark.parametrize("norm", [0, -1, math.nan, "10", True, None])
def test_limits_are_positive(norm: Any) -> None:
    with pytest.raises(InputError, match="norm must be a positive number, or infinity for no limit"):
        Limits(norm)


def test_what_was_read_can_be_written_to() -> None:
    """The message's own memory is not shared: aggregation may work in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        update = read_answer(encode_reply(answer_to(REPORT), REPORT), Sent.of(REPORT), Limits())
    assert update.report is not None
    for tensor in (*update.theta.values(), *update.report.values()):
        tensor.add_(1)
    assert isinstance(Rejected("why"), fc.errors.FedcoverError)
