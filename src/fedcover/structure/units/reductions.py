"""The rules of operations over whole axes: sums, other reductions, softmax, norms and pooling."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedcover.structure.units.operations import Arguments, move_axes, rule, tensors_in

if TYPE_CHECKING:
    from fedcover.structure.units.tracing import UnitTrace


@rule("sum linalg_vector_norm")
def _sum(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    _reduce(trace, args, out, None)


@rule("mean var std var_mean amax amin max min prod argmax argmin logsumexp any all median norm std_mean")
def _mix(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    for tensor in tensors_in(out):
        _reduce(trace, args, tensor, trace.at("takes one number over all of them, which depends on how many there are"))


def _reduce(trace: "UnitTrace", args: Arguments, out: Tensor, reason: str | None) -> None:
    before: Tensor = args["self"]
    dims = args.get("dim")
    dims = list(range(before.ndim)) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    reduced = {axis % before.ndim for axis in dims} if before.ndim else set()
    kept = out.ndim == before.ndim
    left = [axis for axis in range(before.ndim) if axis not in reduced]
    for axis in reduced if reason else ():
        trace.ledger.fix_axis(trace.get(before), axis, str(reason))
    move_axes(trace, before, out, {old: old if kept else new for new, old in enumerate(left)})


@rule("_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod sort topk logcumsumexp _fft_r2c")
def _along(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    before: Tensor = args["self"]
    dims = args.get("dim", -1)
    reason = trace.at("computes each of them from all the others")
    for axis in [dims] if isinstance(dims, int) else dims:
        trace.ledger.fix_axis(trace.get(before), axis % before.ndim, reason)
    for tensor in tensors_in(out):
        if tensor.shape == before.shape:
            trace.put(tensor, trace.get(before))


@rule("native_layer_norm _fused_rms_norm")
def _layer_norm(trace: "UnitTrace", args: Arguments, out: Sequence[Tensor]) -> None:
    images: Tensor = args["input"]
    inner = range(images.ndim - len(args["normalized_shape"]), images.ndim)
    for axis in inner:
        reason = trace.at("normalises over all of them, so that each depends on the others")
        trace.ledger.fix_axis(trace.get(images), axis, reason)
    operands: list[tuple[Tensor, Sequence[int]]] = [(images, range(images.ndim))]
    operands += [(args[name], inner) for name in ("weight", "bias") if args.get(name) is not None]
    sizes = dict(enumerate(images.shape))
    trace.put(out[0], trace.ledger.combine([trace.operand(*one) for one in operands], sizes, ""))


@rule("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm"
      " _batch_norm_with_update batch_norm native_group_norm")  # fmt: skip
def _channel_norm(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    images: Tensor = args["input"]
    operands: list[tuple[Tensor, Sequence[int]]] = [(images, range(images.ndim))]
    operands += [(args[name], [1]) for name in ("weight", "bias") if args.get(name) is not None]
    sizes = dict(enumerate(images.shape))
    factors = trace.ledger.combine([trace.operand(*one) for one in operands], sizes, "")
    for axis in range(images.ndim):
        if axis > 1 or (axis == 0 and "group" not in args):
            reason = trace.at("normalises over all of them, at least in training mode")
            trace.ledger.fix_axis(trace.get(images), axis, reason)
    if "group" in args:  # removing part of a normalisation group would change its statistics
        for factor in factors:
            if 1 in factor.axes:
                ids = trace.ledger.onto(factor, [1]).reshape(args["group"], -1)
                trace.ledger.same(ids, np.broadcast_to(ids[:, :1], ids.shape))
    trace.put(next(tensors_in(out)), factors)


def spatial(trace: "UnitTrace", images: Tensor, out: Any, count: int) -> None:
    """Pass on all but the last ``count`` axes, which are places of an image that are averaged or copied."""
    for axis in range(images.ndim - count, images.ndim):
        trace.ledger.fix_axis(trace.get(images), axis, trace.at("moves over them as over places of an image"))
    places = {axis: axis for axis in range(images.ndim - count)}
    for tensor in tensors_in(out):
        move_axes(trace, images, tensor, places)
