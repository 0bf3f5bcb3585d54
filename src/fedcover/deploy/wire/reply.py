"""The reply of a client, and how the server checks it against its request before anything is averaged."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.base import MOMENTS_NOT_FINITE, NOT_FINITE, ClientUpdate
from fedcover.deploy.wire.fields import check_nothing_left, take_int, take_number
from fedcover.deploy.wire.frame import open_frame, pack_frame, short_repr
from fedcover.deploy.wire.request import TrainRequest
from fedcover.deploy.wire.tensors import (
    Parts,
    decode_mask,
    decode_moments,
    decode_values,
    encode_mask,
    encode_moments,
    encode_values,
    like_moment,
    max_head_bytes,
    max_mask_bytes,
    model_difference,
    num_bytes,
    tensor_table,
)
from fedcover.errors import FedcoverError, InputError
from fedcover.params import Mask, Params, all_finite, numbers
from fedcover.training.options import TrainingOptions

NOT_NEGATIVE = ("square", "count")
"""The moments that are 0 or more."""


class InvalidReplyError(FedcoverError):
    """A reply that must not be averaged; ``reason`` is one sentence about the client."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Limits:
    """Limits on what a reply may contain.

    >>> Limits(norm=math.inf).norm
    inf
    """

    norm: float = 10.0
    """The maximum of ||new - old|| / ||old|| over the client's entries; infinity disables the limit."""

    def __post_init__(self) -> None:
        if isinstance(self.norm, bool) or not isinstance(self.norm, int | float) or not self.norm > 0:
            raise InputError(f"norm must be a positive number, or infinity for no limit; got {self.norm!r}")


@dataclass(frozen=True, eq=False)
class PendingRequest:
    """What the server keeps of a request until the reply arrives."""

    client: int
    round: int
    mask: Mask
    theta: Params
    options: TrainingOptions | None = None
    moments: tuple[str, ...] = ()
    """The names of the moments that the client returns."""
    frozen: tuple[str, ...] = ()
    """The names of the tensors that are not trained and not returned."""
    examples: int | None = None
    """The client's number of examples by the client registry; None to accept any."""

    @staticmethod
    def of(request: TrainRequest, examples: int | None = None) -> "PendingRequest":
        """Return the record of a request."""
        moments = request.recipe.moment_names if request.recipe.keep_moments else ()
        return PendingRequest(
            request.client,
            request.round,
            request.mask,
            request.theta,
            request.options,
            moments,
            request.frozen,
            examples,
        )

    @property
    def regrows(self) -> bool:
        """Whether the reply carries a mask."""
        return self.options is not None and self.options.regrow is not None

    @property
    def reports(self) -> bool:
        """Whether the reply carries a gradient report."""
        return self.options is not None and self.options.report

    @property
    def max_bytes(self) -> int:
        """The size limit of the reply."""
        values = num_bytes(self.theta) * (1 + self.reports)
        values += sum(num_bytes({n: like_moment(m, t) for n, t in self.theta.items()}) for m in self.moments)
        return self.max_head_bytes + values + max_mask_bytes(self.theta) * self.regrows

    @property
    def max_head_bytes(self) -> int:
        """The size limit of the reply's head, which names the tensors of each moment."""
        return max_head_bytes(self.theta) * (1 + len(self.moments))


def encode_reply(update: ClientUpdate, request: TrainRequest) -> bytes:
    """Return the reply to a request as a frame.

    It has the kept values, and a mask or a gradient report only if the request asks for it.
    """
    pending = PendingRequest.of(request)
    sent = {name: tensor for name, tensor in update.theta.items() if name not in request.frozen}
    parts = {f"theta/{name}": encode_values(tensor, update.mask.get(name)) for name, tensor in sent.items()}
    head: dict[str, Any] = {
        "kind": "reply",
        "client": request.client,
        "round": request.round,
        "examples": update.examples,
        "train_loss": update.train_loss if math.isfinite(update.train_loss) else None,
        "tensors": tensor_table(update.theta),
    }
    if update.seconds is not None:
        head["seconds"] = update.seconds
    if pending.regrows:
        head["mask"] = encode_mask(update.mask, parts)
    if pending.reports and update.report is not None:
        head["report"] = tensor_table(update.report)
        parts |= {f"report/{name}": encode_values(tensor, None) for name, tensor in update.report.items()}
    if pending.moments and update.moments is not None:
        head["moments"] = encode_moments(update.moments, update.mask, parts)
    return pack_frame(head, parts)


def decode_reply(data: bytes | memoryview, pending: PendingRequest, limits: Limits) -> ClientUpdate:
    """Return the update in the reply to a request.

    Its theta is 0 outside the mask. Its mask is the same object as the request's, unless the client was asked to regrow
    it.

    Args:
        data: The frame.
        pending: The request.
        limits: Limits on the update.

    Raises:
        InvalidReplyError: If the frame is not a valid reply to this request.
    """
    with _input_errors_as_invalid_replies():
        head, parts = open_frame(data, pending.max_bytes, pending.max_head_bytes)
        _check_address(head, pending)
        if difference := model_difference(head.pop("tensors", None), pending.theta):
            raise InvalidReplyError(f"it trained another model: {difference}")
        mask = _decode_mask(head, parts, pending)
        theta = _decode_params(parts, "theta", pending, mask)
        if not all_finite(theta):
            raise InvalidReplyError(NOT_FINITE)
        examples = take_int(head, "examples", 1)
        if pending.examples is not None and examples != pending.examples:
            raise InvalidReplyError(
                f"it trained on {examples} examples, but has {pending.examples} by the client registry"
            )
        if head.get("train_loss", 0) is None:
            raise InvalidReplyError("its training loss is not finite")
        train_loss = float(take_number(head, "train_loss"))
        seconds = float(take_number(head, "seconds")) if "seconds" in head else None
        report, moments = _decode_report(head, parts, pending), _decode_moments(head, parts, pending, mask)
        check_nothing_left(head, parts)
        _check_change(theta, pending, limits)
    return ClientUpdate(
        pending.client, theta, mask, examples, train_loss, True, report=report, moments=moments, seconds=seconds
    )


@contextmanager
def _input_errors_as_invalid_replies() -> Iterator[None]:
    """Turn InputError into InvalidReplyError: a bad message rejects its client and must not stop the server."""
    try:
        yield
    except InputError as error:
        raise InvalidReplyError(f"its reply cannot be read: {error}") from error


def _check_address(head: dict[str, Any], pending: PendingRequest) -> None:
    if (kind := head.pop("kind", None)) != "reply":
        raise InvalidReplyError(f"it sent {short_repr(kind)}, not a reply")
    if (index := take_int(head, "round")) != pending.round:
        raise InvalidReplyError(f"it replied to round {index}, not {pending.round}")
    if take_int(head, "client") != pending.client:
        raise InvalidReplyError("it replied to a request for another client")


def _decode_mask(head: dict[str, Any], parts: Parts, pending: PendingRequest) -> Mask:
    """Return the request's mask or, if the client was asked to regrow it, the reply's, of the same size per tensor."""
    if not pending.regrows:
        if "mask" in head:
            raise InvalidReplyError("it sent a mask, which was not requested")
        return pending.mask
    mask = decode_mask(parts, head.pop("mask", None), pending.theta)
    if set(mask) != set(pending.mask):
        raise InvalidReplyError("its mask does not have the tensors of the request's mask")
    for name, kept in mask.items():
        count, expected = int(kept.sum()), int(pending.mask[name].sum())
        if count != expected:
            raise InvalidReplyError(f"its mask keeps {count} entries of '{name}', not {expected} as before")
    return {name: mask[name].to(kept.device) for name, kept in pending.mask.items()}


def _decode_params(parts: Parts, part: str, pending: PendingRequest, mask: Mask) -> Params:
    """Return a tensor of full shape for each of the model's, on the same device; frozen ones are the request's."""
    frozen = pending.frozen if part == "theta" else ()
    return {
        n: _masked(t, mask.get(n)) if n in frozen else decode_values(parts, part, n, t, mask.get(n)).to(t.device)
        for n, t in pending.theta.items()
    }


def _decode_report(head: dict[str, Any], parts: Parts, pending: PendingRequest) -> Params | None:
    if not pending.reports:
        if "report" in head:
            raise InvalidReplyError("it sent a gradient report, which was not requested")
        return None
    if "report" not in head:
        raise InvalidReplyError("it sent no gradient report, though one was requested")
    if difference := model_difference(head.pop("report"), pending.theta):
        raise InvalidReplyError(f"its gradient report is of another model: {difference}")
    report = _decode_params(parts, "report", pending, {})
    if not all_finite(report) or any(bool((tensor < 0).any()) for tensor in report.values()):
        raise InvalidReplyError("its gradient report has values that are negative or not finite")
    return report


def _decode_moments(
    head: dict[str, Any], parts: Parts, pending: PendingRequest, mask: Mask
) -> dict[str, Params] | None:
    if not pending.moments:
        if "moments" in head:
            raise InvalidReplyError("it sent moments, which were not requested")
        return None
    moments = decode_moments(parts, head.pop("moments", None), pending.theta, mask)
    if set(moments) != set(pending.moments):
        raise InvalidReplyError(f"it sent other moments than {', '.join(pending.moments)}, which were requested")
    trained = set(pending.theta).difference(pending.frozen)
    for moment, tensors in moments.items():
        if set(tensors) != trained:
            raise InvalidReplyError(f"its moment '{moment}' is not of exactly the tensors that were trained")
    if not all(all_finite(tensors) for tensors in moments.values()):
        raise InvalidReplyError(MOMENTS_NOT_FINITE)
    for moment in NOT_NEGATIVE:
        if any(bool((tensor < 0).any()) for tensor in moments.get(moment, {}).values()):
            raise InvalidReplyError(f"its moment '{moment}' has negative values")
    return moments


def _check_change(theta: Params, pending: PendingRequest, limits: Limits) -> None:
    """Raise InvalidReplyError if ||new - old|| > limit ||old||, where both are theta∘m."""
    if limits.norm == math.inf:
        return
    squares: list[Tensor] = []
    for name, tensor in pending.theta.items():  # one tensor at a time: a whole model in double precision is large
        old = _masked(tensor, pending.mask.get(name)).double()
        squares += [old.square().sum(), (theta[name].double() - old).square_().sum()]
    sums = numbers(squares)
    size, change = math.sqrt(sum(sums[::2])) or 1.0, math.sqrt(sum(sums[1::2]))
    if not change <= limits.norm * size or math.isinf(change):
        raise InvalidReplyError(f"its change is {change / size:.3g} times its size, over the limit of {limits.norm:g}")


def _masked(tensor: Tensor, kept: Tensor | None) -> Tensor:
    return tensor if kept is None else torch.where(kept, tensor, torch.zeros_like(tensor))
