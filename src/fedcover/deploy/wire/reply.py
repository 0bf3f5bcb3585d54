"""What a client sends back, and how the server checks it against what it had sent before anything is averaged."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.deploy.wire.fields import nothing_left, number, whole
from fedcover.deploy.wire.frame import open_frame, pack_frame, shown
from fedcover.deploy.wire.request import TrainRequest
from fedcover.deploy.wire.tensors import (
    Parts,
    bytes_of,
    difference,
    head_bytes_of,
    mask_bytes_of,
    put_mask,
    put_values,
    table_of,
    take_mask,
    take_values,
)
from fedcover.errors import FedcoverError, InputError
from fedcover.params import Mask, Params, all_finite, numbers
from fedcover.training.options import TrainingOptions

NOT_FINITE = "its trained values are not all finite"
"""What a federation's record says of such a client too."""


class Rejected(FedcoverError):
    """An answer that must not be averaged; ``reason`` says why, in one sentence about the client."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """How far an answer may go.

    >>> Limits(norm=math.inf).norm
    inf
    """

    norm: float = 10.0
    """The most that ||new - old|| may be, as a multiple of ||old||, over the client's entries; infinity: no limit."""

    def __post_init__(self) -> None:
        if isinstance(self.norm, bool) or not isinstance(self.norm, int | float) or not self.norm > 0:
            raise InputError(f"norm must be a positive number, or infinity for no limit; got {self.norm!r}")


@dataclass(frozen=True, eq=False)
class Sent:
    """What the server remembers of an order until its answer comes."""

    client: int
    round: int
    mask: Mask
    theta: Params
    options: TrainingOptions | None = None
    examples: int | None = None
    """How many examples the client has, if the server knows."""

    @staticmethod
    def of(order: TrainRequest, examples: int | None = None) -> "Sent":
        """The record of an order."""
        return Sent(order.client, order.round, order.mask, order.theta, order.options, examples)

    @property
    def regrows(self) -> bool:
        """Whether the answer carries a mask."""
        return self.options is not None and self.options.regrow is not None

    @property
    def reports(self) -> bool:
        """Whether the answer carries a report."""
        return self.options is not None and self.options.report

    @property
    def most(self) -> int:
        """The most bytes that an answer can have."""
        values, masks = bytes_of(self.theta) * (1 + self.reports), mask_bytes_of(self.theta) * self.regrows
        return head_bytes_of(self.theta) + values + masks


def encode_reply(update: ClientUpdate, order: TrainRequest) -> bytes:
    """The answer to an order as a frame: kept values; a mask and a report only if the order asks for them."""
    sent = Sent.of(order)
    parts = {f"theta/{name}": put_values(tensor, update.mask.get(name)) for name, tensor in update.theta.items()}
    head: dict[str, Any] = {
        "kind": "answer",
        "client": order.client,
        "round": order.round,
        "examples": update.examples,
        "train_loss": update.train_loss if math.isfinite(update.train_loss) else None,
        "tensors": table_of(update.theta),
    }
    if sent.regrows:
        head["mask"] = put_mask(update.mask, parts)
    if sent.reports and update.report is not None:
        head["report"] = table_of(update.report)
        parts |= {f"report/{name}": put_values(tensor, None) for name, tensor in update.report.items()}
    return pack_frame(head, parts)


def read_answer(data: bytes | memoryview, sent: Sent, limits: Limits) -> ClientUpdate:
    """The update in an answer, if it is one to what was sent; ``Rejected`` if anything is wrong with it.

    Its theta is 0 outside the mask, and its mask the very object that was sent, unless the client was to regrow it.
    """
    with _rejecting():
        head, parts = open_frame(data, sent.most, head_bytes_of(sent.theta))
        _check_address(head, sent)
        if why := difference(head.pop("tensors", None), sent.theta):
            raise Rejected(f"it trained another model: {why}")
        mask = _take_mask(head, parts, sent)
        theta = _take_params(parts, "theta", sent, mask)
        if not all_finite(theta):
            raise Rejected(NOT_FINITE)
        examples = whole(head, "examples", 1)
        if sent.examples is not None and examples != sent.examples:
            raise Rejected(f"it trained on {examples} examples, but has {sent.examples} by the census")
        train_loss = float(number(head, "train_loss"))
        report = _take_report(head, parts, sent)
        nothing_left(head, parts)
        _check_change(theta, sent, limits)
    return ClientUpdate(sent.client, theta, mask, examples, train_loss, finite=True, report=report)


@contextmanager
def _rejecting() -> Iterator[None]:
    """What is wrong with a message is a reason to reject the client that sent it, not to stop the server."""
    try:
        yield
    except InputError as error:
        raise Rejected(f"its answer cannot be read: {error}") from error


def _check_address(head: dict[str, Any], sent: Sent) -> None:
    if (kind := head.pop("kind", None)) != "answer":
        raise Rejected(f"it sends {shown(kind)}, not an answer")
    if (at := whole(head, "round")) != sent.round:
        raise Rejected(f"it answers round {at}, not {sent.round}")
    if whole(head, "client") != sent.client:
        raise Rejected("it answers an order that another client got")


def _take_mask(head: dict[str, Any], parts: Parts, sent: Sent) -> Mask:
    """The mask that was sent or, if the client was to regrow it, its own, with as many entries in each tensor."""
    if not sent.regrows:
        if "mask" in head:
            raise Rejected("it sends a mask, though none was asked for")
        return sent.mask
    mask = take_mask(parts, head.pop("mask", None), sent.theta)
    if set(mask) != set(sent.mask):
        raise Rejected("its mask is not of the tensors that were sent with one")
    for name, kept in mask.items():
        many, before = int(kept.sum()), int(sent.mask[name].sum())
        if many != before:
            raise Rejected(f"its mask keeps {many} entries of '{name}', not {before} as before")
    return {name: mask[name].to(kept.device) for name, kept in sent.mask.items()}


def _take_params(parts: Parts, part: str, sent: Sent, mask: Mask) -> Params:
    """A full-shaped tensor for each of the model's, where that is."""
    return {n: take_values(parts, part, n, t, mask.get(n)).to(t.device) for n, t in sent.theta.items()}


def _take_report(head: dict[str, Any], parts: Parts, sent: Sent) -> Params | None:
    if not sent.reports:
        if "report" in head:
            raise Rejected("it sends a report, though none was asked for")
        return None
    if "report" not in head:
        raise Rejected("it sends no report, though one was asked for")
    if why := difference(head.pop("report"), sent.theta):
        raise Rejected(f"its report is of another model: {why}")
    report = _take_params(parts, "report", sent, {})
    if not all_finite(report) or any(bool((tensor < 0).any()) for tensor in report.values()):
        raise Rejected("its report has values that are negative or not finite")
    return report


def _check_change(theta: Params, sent: Sent, limits: Limits) -> None:
    """Nothing, or a rejection if ||new - old|| > limit ||old||, both of them theta o m."""
    if limits.norm == math.inf:
        return
    squares: list[Tensor] = []
    for name, tensor in sent.theta.items():  # one after another: doubles of a whole model are large
        old = _held(tensor, sent.mask.get(name)).double()
        squares += [old.square().sum(), (theta[name].double() - old).square_().sum()]
    found = numbers(squares)
    size, change = math.sqrt(sum(found[::2])) or 1.0, math.sqrt(sum(found[1::2]))
    if not change <= limits.norm * size or math.isinf(change):
        raise Rejected(f"its change is {change / size:.3g} times its size, over the limit of {limits.norm:g}")


def _held(tensor: Tensor, kept: Tensor | None) -> Tensor:
    return tensor if kept is None else torch.where(kept, tensor, torch.zeros_like(tensor))
