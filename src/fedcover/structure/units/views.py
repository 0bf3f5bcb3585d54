"""The rules of operations that move indices: views, parts, joins and shuffles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedcover.structure.units.labels import Factor, Ids, Operand, reshaped
from fedcover.structure.units.operations import Arguments, move_axes, rule, unknown

if TYPE_CHECKING:
    from fedcover.structure.units.tracing import UnitTrace


@rule("view _unsafe_view reshape _reshape_alias unsafe_view")
def _view(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before = args["self"]
    factors = reshaped(trace.ledger, trace.get(before), before.shape, out.shape)
    trace.put(out, factors, trace.origins.get(id(before)))


@rule("permute transpose t numpy_T movedim")
def _permute(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    order = list(range(before.ndim))
    if "dims" in args:
        order = [axis % before.ndim for axis in args["dims"]]
    elif "dim0" in args:
        a, b = args["dim0"] % before.ndim, args["dim1"] % before.ndim
        order[a], order[b] = order[b], order[a]
    else:
        order.reverse()
    move_axes(trace, before, out, {old: new for new, old in enumerate(order)})


@rule("unsqueeze")
def _unsqueeze(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    place = args["dim"] % out.ndim
    move_axes(trace, args["self"], out, {axis: axis + (axis >= place) for axis in range(out.ndim - 1)})


@rule("squeeze")
def _squeeze(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    dims = args.get("dim", range(before.ndim))
    removed = {axis % before.ndim for axis in ([dims] if isinstance(dims, int) else dims)}
    left = [axis for axis in range(before.ndim) if axis not in removed or before.shape[axis] != 1]
    move_axes(trace, before, out, {old: new for new, old in enumerate(left)})


@rule("expand")
def _expand(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    shift = out.ndim - before.ndim
    same = {axis: axis + shift for axis in range(before.ndim) if before.shape[axis] == out.shape[axis + shift]}
    move_axes(trace, before, out, same)


def _taken(factors: Sequence[Factor], axis: int, index: Any) -> list[Factor]:
    """Return the labels of some indices of an axis; an int removes the axis."""
    result = []
    for factor in factors:
        if axis in factor.axes:
            ids = factor.ids.take(index, factor.axes.index(axis))
            factor = Factor(tuple(a for a in factor.axes if a != axis or not isinstance(index, int)), ids)
        if isinstance(index, int):
            factor = factor.renamed({a: a - (a > axis) for a in factor.axes})
        if factor.axes:
            result.append(factor)
    return result


@rule("select")
def _select(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    axis = args["dim"] % before.ndim
    factors = _taken(trace.get(before), axis, int(args["index"]) % before.shape[axis])
    trace.put(out, factors, trace.origins.get(id(before)))


@rule("slice")
def _slice(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    axis = args.get("dim", 0) % before.ndim
    index = np.arange(before.shape[axis])[args.get("start") : args.get("end") : args.get("step", 1)]
    trace.put(out, _taken(trace.get(before), axis, index), trace.origins.get(id(before)))


@rule("split unsafe_split split_with_sizes unsafe_split_with_sizes chunk unsafe_chunk tensor_split")
def _split(trace: "UnitTrace", args: Arguments, out: Sequence[Tensor]) -> None:
    before: Tensor = args["self"]
    axis, start = args.get("dim", 0) % before.ndim, 0
    for part in out:
        index = np.arange(start, start + part.shape[axis])
        trace.put(part, _taken(trace.get(before), axis, index), trace.origins.get(id(before)))
        start += part.shape[axis]


@rule("unbind")
def _unbind(trace: "UnitTrace", args: Arguments, out: Sequence[Tensor]) -> None:
    before: Tensor = args["self"]
    for index, part in enumerate(out):
        factors = _taken(trace.get(before), args.get("dim", 0) % before.ndim, index)
        trace.put(part, factors, trace.origins.get(id(before)))


@rule("index_select flip roll")
def _reordered(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    factors: Sequence[Factor] = trace.get(before)
    if "index" in args:
        factors = _taken(factors, args["dim"] % before.ndim, args["index"].numpy())
    else:
        for place, axis in enumerate(args["dims"]):
            index = np.arange(before.shape[axis])
            index = np.roll(index, args["shifts"][place]) if "shifts" in args else index[::-1]
            factors = _taken(factors, axis % before.ndim, index)
    trace.put(out, factors)


@rule("cat stack")
def _cat(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    parts, axis = list(args["tensors"]), args.get("dim", 0) % out.ndim
    if all(tensor.ndim == out.ndim - 1 for tensor in parts):  # stacked
        names = [place for place in range(out.ndim) if place != axis]
    else:
        names = list(range(out.ndim))
        parts = [part for part in parts if part.ndim == out.ndim]  # torch.cat ignores empty tensors of one axis
    operands = [trace.operand(part, names) for part in parts]
    trace.used_alone(parts)
    others = {place: size for place, size in enumerate(out.shape) if place != axis}
    beside = [
        Operand(others, tuple(factor for factor in operand.factors if axis not in factor.axes)) for operand in operands
    ]
    reason = trace.at("joins them with numbers that are not units")
    factors = list(trace.ledger.combine(beside, others, reason))
    along = [operand.at(axis) for operand in operands]
    if any(factor is not None for factor in along):
        ids: list[Ids] = []
        shared = [a for a in range(out.ndim) if all(f is not None and a in f.axes for f in along)] or [axis]
        for operand, factor in zip(operands, along, strict=True):
            if factor is None:
                ids.append(trace.ledger.fresh(operand.sizes[axis]))
                trace.ledger.fix(ids[-1], "they are numbers without units")
            else:
                ids.append(trace.ledger.onto(factor, shared))
        factors.append(Factor(tuple(shared), np.concatenate(ids, shared.index(axis))))
    trace.put(out, factors)


@rule("repeat")
def _repeat(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    shift = out.ndim - before.ndim
    factors = []
    for factor in trace.get(before):
        times = [args["repeats"][axis + shift] for axis in factor.axes]
        factors.append(Factor(tuple(axis + shift for axis in factor.axes), np.tile(factor.ids, times)))
    trace.put(out, factors)


@rule("glu")
def _glu(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    axis, half = args.get("dim", -1) % before.ndim, out.shape[args.get("dim", -1)]
    halves = [_taken(trace.get(before), axis, np.arange(half) + half * side) for side in (0, 1)]
    operands = [Operand(dict(enumerate(out.shape)), tuple(factors)) for factors in halves]
    trace.put(out, trace.ledger.combine(operands, dict(enumerate(out.shape)), ""))


@rule("pixel_shuffle pixel_unshuffle")
def _shuffle(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    """Follow the views that a shuffle of pixels is made of."""
    before: Tensor = args["self"]
    back = "downscale_factor" in args
    factor: int = args.get("downscale_factor") or args["upscale_factor"]
    *front, channels, height, width = (out if back else before).shape
    split = [*front, channels // factor**2, factor, factor, height, width]
    n = len(front)
    if back:
        wide = [*front, channels // factor**2, height, factor, width, factor]
        order = [*range(n), n, n + 2, n + 4, n + 1, n + 3]
        factors = reshaped(trace.ledger, trace.get(before), before.shape, wide)
    else:
        wide = split
        order = [*range(n), n, n + 3, n + 1, n + 4, n + 2]
        factors = reshaped(trace.ledger, trace.get(before), before.shape, wide)
    moved = [factor_.renamed({old: new for new, old in enumerate(order)}) for factor_ in factors]
    trace.put(out, reshaped(trace.ledger, moved, [wide[axis] for axis in order], out.shape))


@rule("index")
def _index(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    indexed = [axis for axis, index in enumerate(args["indices"]) if index is not None]
    for axis in indexed:
        trace.ledger.fix_axis(trace.get(before), axis, trace.at("chooses some of them by number"))
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        unknown(trace, "index", args, out)
        return
    added = out.ndim - before.ndim
    stay = {a: a if a < indexed[0] else a + added for a in range(before.ndim) if a not in indexed}
    move_axes(trace, before, out, stay)


@rule("_pack_padded_sequence _pad_packed_sequence")
def _packed(trace: "UnitTrace", args: Arguments, out: Sequence[Tensor]) -> None:
    before: Tensor = next(iter(args.values()))
    move_axes(trace, before, out[0], {before.ndim - 1: out[0].ndim - 1})


@rule("constant_pad_nd")
def _pad(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    same = {axis: axis for axis in range(out.ndim) if out.shape[axis] == before.shape[axis]}
    for axis in set(range(out.ndim)) - same.keys():
        trace.ledger.fix_axis(trace.get(before), axis, trace.at("adds others to them"))
    move_axes(trace, before, out, same)
