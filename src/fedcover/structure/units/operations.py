"""The rules by which each operation of torch passes on the labels of units."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fedcover.structure.units.labels import Factor, Ids, Operand, reshaped

if TYPE_CHECKING:
    from fedcover.structure.units.tracing import UnitTrace

Arguments = dict[str, Any]
Rule = Callable[["UnitTrace", Arguments, Any], None]
RULES: dict[str, Rule] = {}
"""The rule of each operation, by its name in ``torch.ops.aten`` without the underscore of in-place variants."""
ELEMENTWISE = (
    "detach alias clone copy contiguous _to_copy to dropout native_dropout bernoulli lift_fresh masked_fill where"
    " zeros_like ones_like full_like empty_like rand_like randn_like randint_like _prelu_kernel nan_to_num fill zero"
    " _conj _reshape_alias_copy lerp addcmul addcdiv uniform normal"
).split()
FACTORIES = "zeros ones full empty rand randn new_zeros new_ones new_full new_empty empty_strided scalar_tensor".split()


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def elementwise(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    """Operands meet index by index, from the last axis on; axes of size 1 are broadcast."""
    first = next((tensor for tensor in tensors_in(out) if tensor.ndim), None)
    if first is None:
        return
    operands = [tensor for value in args.values() for tensor in tensors_in(value) if tensor.ndim]
    trace.used_alone(operands)
    factors = trace.ledger.combine(
        [trace.operand(tensor, range(first.ndim - tensor.ndim, first.ndim)) for tensor in operands],
        dict(enumerate(first.shape)),
        trace.at("combines them with numbers that are not units"),
    )
    origins = {trace.origins.get(id(tensor)) for tensor in operands}
    for tensor in tensors_in(out):
        if tensor.shape == first.shape:
            trace.put(tensor, factors, origins.pop() if len(origins) == 1 else None)


def factory(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    """A new tensor may be of any size: its indices are whatever units it meets."""
    trace.put(out, [Factor((axis,), trace.ledger.fresh(size)) for axis, size in enumerate(out.shape)])


def contraction(trace: "UnitTrace", operands: Sequence[tuple[Tensor, Sequence[object]]], axes: str, out: Tensor) -> None:
    """Multiply tensors and sum over the axes that the result does not have."""
    sizes = dict(zip(axes, out.shape, strict=True))
    trace.used([(tensor, [name in sizes for name in names]) for tensor, names in operands])
    factors = trace.ledger.combine(
        [trace.operand(tensor, names) for tensor, names in operands],
        sizes,
        trace.at("combines them with numbers that are not units"),
    )
    trace.put(out, [factor.renamed({name: place for place, name in enumerate(axes)}) for factor in factors])


@rule("mm addmm bmm baddbmm mv addmv dot addbmm")
def _matmul(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    values = [value for value in args.values() if isinstance(value, Tensor)]
    first, second = values[-2:]
    batch = "b" if first.ndim == 3 else ""
    summed_batch = batch and out.ndim == 2
    names = [batch + ("ij" if first.ndim > 1 else "j"), batch + ("jk" if second.ndim > 1 else "j")]
    axes = ("" if summed_batch else batch) + ("i" if first.ndim > 1 else "") + ("k" if second.ndim > 1 else "")
    operands = [(first, names[0]), (second, names[1])]
    if len(values) == 3:
        operands.append((values[0], axes[out.ndim - values[0].ndim :]))
    contraction(trace, operands, axes, out)


@rule("linear")
def _linear(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    front = "abcdefgh"[: args["input"].ndim - 1]
    operands = [(args["input"], front + "j"), (args["weight"], "kj")]
    contraction(trace, operands + ([(args["bias"], "k")] if args.get("bias") is not None else []), front + "k", out)


@rule("convolution _convolution")
def _convolution(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    images, weight, bias = args["input"], args["weight"], args.get("bias")
    groups, spatial = args["groups"], images.ndim - 2
    for axis in range(2, images.ndim):
        trace.ledger.fix_axis(trace.get(images), axis, trace.at("moves over them as over places of an image"))
    before, kernel, after = "xyz"[:spatial], "uvw"[:spatial], "pqr"[:spatial]
    if groups == 1:
        names = ("jk" if args["transposed"] else "kj") + kernel
        operands = [(images, "nj" + before), (weight, names)]
    elif groups == images.shape[1] == out.shape[1] and not args["transposed"]:
        operands = [(images, "nk" + before), (weight, "km" + kernel)]
    else:
        for tensor, axis in ((images, 1), (weight, 0), (weight, 1)):
            reason = trace.at(f"has {groups} groups of channels, of which none can lose a channel")
            trace.ledger.fix_axis(trace.get(tensor), axis, reason)
        names = "mk" if args["transposed"] else "km"
        trace.used([(weight, [name == "k" for name in names] + [False] * spatial)])
        operands = [(images, "nj" + before)]
        if not args["transposed"]:
            operands.append((weight, "km" + kernel))
    operands += [(bias, "k")] if bias is not None else []
    contraction(trace, operands, "nk" + after, out)


@rule("embedding")
def _embedding(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    weight = args["weight"]
    trace.ledger.fix_axis(trace.get(weight), 0, "the inputs choose among them")
    trace.used([(weight, [False, True])])
    trace.put(out, [factor.renamed({1: out.ndim - 1}) for factor in trace.get(weight) if factor.axes == (1,)])


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
    _renamed(trace, before, out, {old: new for new, old in enumerate(order)})


@rule("unsqueeze")
def _unsqueeze(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    place = args["dim"] % out.ndim
    _renamed(trace, args["self"], out, {axis: axis + (axis >= place) for axis in range(out.ndim - 1)})


@rule("squeeze")
def _squeeze(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    dims = args.get("dim", range(before.ndim))
    gone = {axis % before.ndim for axis in ([dims] if isinstance(dims, int) else dims)}
    left = [axis for axis in range(before.ndim) if axis not in gone or before.shape[axis] != 1]
    _renamed(trace, before, out, {old: new for new, old in enumerate(left)})


@rule("expand")
def _expand(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    shift = out.ndim - before.ndim
    same = {axis: axis + shift for axis in range(before.ndim) if before.shape[axis] == out.shape[axis + shift]}
    _renamed(trace, before, out, same)


def _renamed(trace: "UnitTrace", before: Tensor, out: Tensor, places: dict[int, int]) -> None:
    """Put the labels of the axes that a result still has; the others have size 1."""
    factors = []
    for factor in trace.get(before):
        axes = tuple(axis for axis in factor.axes if axis in places)
        if axes:
            factors.append(Factor(axes, trace.ledger.onto(factor, axes)).renamed(places))  # type: ignore[arg-type]
    trace.put(out, factors, trace.origins.get(id(before)))


def _taken(factors: Sequence[Factor], axis: int, index: Any) -> list[Factor]:
    """Return the labels of some indices of an axis; an int removes the axis."""
    result = []
    for factor in factors:
        if axis in factor.axes:
            ids = factor.ids.take(index, factor.axes.index(axis))
            factor = Factor(tuple(a for a in factor.axes if a != axis or not isinstance(index, int)), ids)
        if isinstance(index, int):
            factor = factor.renamed({a: a - (a > axis) for a in factor.axes})  # type: ignore[operator]
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
    stacked = len({tensor.ndim for tensor in args["tensors"]} - {out.ndim}) > 0 and "dim" in args
    parts, axis = list(args["tensors"]), args.get("dim", 0) % out.ndim
    if all(tensor.ndim == out.ndim - 1 for tensor in parts):
        stacked = True
    names = [range(out.ndim) if not stacked else [a for a in range(out.ndim) if a != axis] for _ in parts]
    parts = [part for part in parts if stacked or part.ndim == out.ndim]  # empty tensors of one axis are ignored
    operands = [trace.operand(part, own) for part, own in zip(parts, names, strict=False)]
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
        times = [args["repeats"][axis + shift] for axis in factor.axes]  # type: ignore[operator]
        factors.append(Factor(tuple(axis + shift for axis in factor.axes), np.tile(factor.ids, times)))  # type: ignore[operator]
    trace.put(out, factors)


@rule("glu")
def _glu(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    axis, half = args.get("dim", -1) % before.ndim, out.shape[args.get("dim", -1)]
    halves = [_taken(trace.get(before), axis, np.arange(half) + half * side) for side in (0, 1)]
    operands = [Operand(dict(enumerate(out.shape)), tuple(factors)) for factors in halves]
    trace.put(out, trace.ledger.combine(operands, dict(enumerate(out.shape)), ""))


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
    gone = {axis % before.ndim for axis in dims} if before.ndim else set()
    kept = out.ndim == before.ndim
    left = [axis for axis in range(before.ndim) if axis not in gone]
    for axis in gone if reason else ():
        trace.ledger.fix_axis(trace.get(before), axis, str(reason))
    _renamed(trace, before, out, {old: old if kept else new for new, old in enumerate(left)})


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
    operands = [(images, range(images.ndim))]
    operands += [(args[name], inner) for name in ("weight", "bias") if args.get(name) is not None]
    sizes = dict(enumerate(images.shape))
    trace.put(out[0], trace.ledger.combine([trace.operand(*one) for one in operands], sizes, ""))


@rule("native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm"
      " _batch_norm_with_update batch_norm native_group_norm")  # fmt: skip
def _channel_norm(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    images: Tensor = args["input"]
    operands = [(images, range(images.ndim))]
    operands += [(args[name], [1]) for name in ("weight", "bias") if args.get(name) is not None]
    sizes = dict(enumerate(images.shape))
    factors = trace.ledger.combine([trace.operand(*one) for one in operands], sizes, "")
    if "group" in args:  # removing part of a normalisation group would change its statistics
        for factor in factors:
            if 1 in factor.axes:
                ids = trace.ledger.onto(factor, [1]).reshape(args["group"], -1)
                trace.ledger.same(ids, np.broadcast_to(ids[:, :1], ids.shape))
    trace.put(next(tensors_in(out)), factors)


def spatial(trace: "UnitTrace", images: Tensor, out: Any, count: int) -> None:
    """The last ``count`` axes are places of an image, which are averaged or copied; the others stay."""
    for axis in range(images.ndim - count, images.ndim):
        trace.ledger.fix_axis(trace.get(images), axis, trace.at("moves over them as over places of an image"))
    places = {axis: axis for axis in range(images.ndim - count)}
    for tensor in tensors_in(out):
        _renamed(trace, images, tensor, places)


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


@rule("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"
      " _scaled_dot_product_flash_attention _scaled_dot_product_attention_math scaled_dot_product_attention")  # fmt: skip
def _attention(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    query, key, value = args["query"], args["key"], args["value"]
    front = "bh" if query.ndim == 4 else "b"
    names = (f"{front}td", f"{front}sd", f"{front}se")
    contraction(trace, list(zip((query, key, value), names, strict=True)), f"{front}te", next(tensors_in(out)))


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
    _renamed(trace, before, out, stay)


@rule("_pack_padded_sequence _pad_packed_sequence")
def _packed(trace: "UnitTrace", args: Arguments, out: Sequence[Tensor]) -> None:
    before: Tensor = next(iter(args.values()))
    _renamed(trace, before, out[0], {before.ndim - 1: out[0].ndim - 1})


@rule("constant_pad_nd")
def _pad(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    before: Tensor = args["self"]
    same = {axis: axis for axis in range(out.ndim) if out.shape[axis] == before.shape[axis]}
    for axis in set(range(out.ndim)) - same.keys():
        trace.ledger.fix_axis(trace.get(before), axis, trace.at("adds others to them"))
    _renamed(trace, before, out, same)


def unknown(trace: "UnitTrace", name: str, args: Arguments, out: Any) -> None:
    """State that units which pass an operation without a rule cannot be removed."""
    reason = trace.at(f"has the operation '{name}', through which units cannot be followed")
    for value in args.values():
        for tensor in tensors_in(value):
            for factor in trace.get(tensor):
                trace.ledger.fix(factor.ids, reason)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result, which may be a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


