"""The rules by which operations of torch pass on the labels of units: products, and operations index by index."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedcover.structure.units.labels import Factor

if TYPE_CHECKING:
    from fedcover.structure.units.tracing import UnitTrace

Arguments = dict[str, Any]
Rule = Callable[["UnitTrace", Arguments, Any], None]
RULES: dict[str, Rule] = {}
"""The rule of each operation, by its name in ``torch.ops.aten`` without the underscore of in-place variants."""
ELEMENTWISE = {
    "detach", "alias", "clone", "copy", "contiguous", "_to_copy", "to", "dropout", "native_dropout", "bernoulli",
    "lift_fresh", "masked_fill", "where", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like",
    "randn_like", "randint_like", "_prelu_kernel", "nan_to_num", "fill", "zero", "_conj", "lerp", "addcmul",
    "addcdiv", "uniform", "normal",
}  # fmt: skip
"""Operations index by index that torch does not tag as such."""
FACTORIES = frozenset(
    ["zeros", "ones", "full", "empty", "rand", "randn", "new_zeros", "new_ones", "new_full", "new_empty"]
)
COMBINES = "combines them with numbers that are not units, such as inputs or constants"


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for the operations of these names."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result, which may be a list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def unknown(trace: "UnitTrace", name: str, args: Arguments, out: Any) -> None:
    """State that units which pass an operation without a rule cannot be removed."""
    reason = trace.at(f"has the operation '{name}', through which units cannot be followed")
    for tensor in tensors_in(list(args.values())):
        trace.used([(tensor, [True] * tensor.ndim)])
        for factor in trace.get(tensor):
            trace.ledger.fix(factor.ids, reason)


def elementwise(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    """Let operands meet index by index, from the last axis on; axes of size 1 are broadcast."""
    first = next((tensor for tensor in tensors_in(out) if tensor.ndim), None)
    if first is None:
        return
    operands = [tensor for value in args.values() for tensor in tensors_in(value) if tensor.ndim]
    trace.used_alone(operands)
    factors = trace.ledger.combine(
        [trace.operand(tensor, range(first.ndim - tensor.ndim, first.ndim)) for tensor in operands],
        dict(enumerate(first.shape)),
        trace.at(COMBINES),
    )
    origins = {trace.origins.get(id(tensor)) for tensor in operands}
    for tensor in tensors_in(out):
        if tensor.shape == first.shape:
            trace.put(tensor, factors, origins.pop() if len(origins) == 1 else None)


def factory(trace: "UnitTrace", args: Arguments, out: Tensor) -> None:
    """Give a new tensor labels of its own: it may have any size, so its indices are the units that it meets."""
    trace.put(out, [Factor((axis,), trace.ledger.fresh(size)) for axis, size in enumerate(out.shape)])


def move_axes(trace: "UnitTrace", before: Tensor, out: Tensor, places: dict[int, int]) -> None:
    """Put the labels of the axes that a result still has; the others have size 1."""
    factors = []
    for factor in trace.get(before):
        axes = tuple(axis for axis in factor.axes if axis in places)
        if axes:
            factors.append(Factor(axes, trace.ledger.onto(factor, axes)).renamed(places))
    trace.put(out, factors, trace.origins.get(id(before)))


def contraction(
    trace: "UnitTrace", operands: Sequence[tuple[Tensor, Sequence[object]]], axes: str, out: Tensor
) -> None:
    """Multiply tensors and sum over the axes that the result does not have."""
    sizes = dict(zip(axes, out.shape, strict=True))
    trace.used([(tensor, [name in sizes for name in names]) for tensor, names in operands])
    factors = trace.ledger.combine(
        [trace.operand(tensor, names) for tensor, names in operands],
        sizes,
        trace.at(COMBINES),
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


@rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention scaled_dot_product_attention"
)
def _attention(trace: "UnitTrace", args: Arguments, out: Any) -> None:
    query, key, value = args["query"], args["key"], args["value"]
    if query.ndim == 4:  # several heads of queries may share one of keys and values
        key, value = (_repeated_heads(trace, tensor, query.shape[1]) for tensor in (key, value))
    front = "bh" if query.ndim == 4 else "b"
    names = (f"{front}td", f"{front}sd", f"{front}se")
    contraction(trace, list(zip((query, key, value), names, strict=True)), f"{front}te", next(tensors_in(out)))


def _repeated_heads(trace: "UnitTrace", tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values with one head for each head of queries."""
    times = heads // tensor.shape[1]
    if times == 1:
        return tensor
    repeated = tensor.repeat_interleave(times, 1)
    factors = [
        Factor(factor.axes, factor.ids.repeat(times, factor.axes.index(1)) if 1 in factor.axes else factor.ids)
        for factor in trace.get(tensor)
    ]
    trace.put(repeated, factors, trace.origins.get(id(tensor)))
    return repeated
