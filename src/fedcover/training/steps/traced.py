"""The operations of a training step: loss, gradients and momenta, found by tracing a model once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.seeding import ambient
from fedcover.structure.dropout import DropoutCall, Stream

aten = torch.ops.aten

VIEWS = {aten.t.default, aten.transpose.int, aten.view.default, aten.expand.default, aten.permute.default}
VIEWS |= {aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.slice.Tensor}
"""Operations whose result lies in the memory of their input."""
SAME = {aten.detach.default, aten.alias.default}
"""Operations that change nothing where no gradients are recorded."""
CONSTANT = {aten.ones_like.default, aten.zeros_like.default}
"""Operations whose result depends on the shape of their input alone."""
QUICK = {
    aten.addmm.default: torch.addmm,
    aten.mm.default: torch.mm,
    aten.t.default: torch.t,
    aten.relu.default: torch.relu,
    aten.mul.Tensor: torch.mul,
    aten.add.Tensor: torch.add,
    aten.sum.dim_IntList: torch.sum,
    aten._log_softmax.default: torch._log_softmax,
    aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
}
"""The same operations by a way in that takes less time."""
IN_PLACE = {aten.mul.Tensor: "mul_", aten.add.Tensor: "add_", aten.relu.default: "relu_"}
"""Operations that may write over their first input where nobody else needs it."""


@dataclass(frozen=True)
class TracedStep:
    """A traced step for one shape of batch, bound to a model's parameters and momenta."""

    run: Callable[..., Tensor]
    """(x, y, momentum, scale of each ask) -> loss; adds gradients to the momenta, leaves parameters alone."""
    asks: tuple[DropoutCall, ...]
    """The dropout that a step needs."""


def trace_step(
    model: nn.Module,
    stream: Stream,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    momenta: Mapping[str, Tensor],
) -> TracedStep | None:
    """The program of one step on batches like (x, y); None if the model cannot be traced.

    ``momenta`` has the velocity of every trained parameter.
    """
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    fixed = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name not in momenta}
    values = [*(model.get_parameter(name).detach() for name in trained), *fixed.values()]

    def step(x: Tensor, y: Tensor, *tensors: Tensor) -> list[Tensor]:
        parameters = [tensor.requires_grad_() for tensor in tensors[: len(trained)]]
        named = dict(zip([*trained, *fixed], [*parameters, *tensors[len(trained) :]], strict=False))
        stream.prepared = dict(zip(asks, tensors[len(values) :], strict=True))
        stream.step = 0
        found = loss(functional_call(model, named, (x,)), y)
        return [found, *torch.autograd.grad(found, parameters, materialize_grads=True)]

    try:
        with ambient(0, "trace"), torch.enable_grad():
            asks = asks_of(model, stream, x)
            drawn = [torch.ones(ask.shape, dtype=ask.dtype) for ask in asks]
            inputs = [tensor.detach().clone() for tensor in values]
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, y, *inputs, *drawn)
    except MemoryError:
        raise
    except Exception:  # such as control flow that depends on data
        return None
    finally:
        stream.prepared = None
    return TracedStep(_bind(graph, values, [momenta[name] for name in trained], len(asks)), asks)


def asks_of(model: nn.Module, stream: Stream, x: Tensor) -> tuple[DropoutCall, ...]:
    """The dropout that one forward pass asks for."""
    stream.recorded.clear()
    stream.step = 0
    with torch.no_grad():
        model(x.clone())  # a model may write to its input
    return tuple(stream.recorded)


def _bind(
    traced: fx.GraphModule, values: Sequence[Tensor], momenta: Sequence[Tensor], asks: int
) -> Callable[..., Tensor]:
    """The traced step as a function of (x, y, momentum, scales), with all that stands still filled in."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    ((loss, *grads),) = next(node for node in traced.graph.nodes if node.op == "output").args
    still = _still(traced, dict(zip(inputs[2:], values, strict=False)))
    sums = [_as_product(grad, v) for grad, v in zip(grads, momenta, strict=True)]
    needed = {loss, *(grad for grad, found in zip(grads, sums, strict=True) if found is None)}
    needed |= {node for found in sums if found for node in found[1:] if isinstance(node, fx.Node)}
    live = _live(traced, needed, still)

    write = _Writer(still, live, needed)
    x, y, momentum = (write.graph.placeholder(name) for name in ("x", "y", "momentum"))
    write.new |= {inputs[0]: x, inputs[1]: y}
    for number, node in enumerate(inputs[len(inputs) - asks :]):
        write.new[node] = write.graph.placeholder(f"scale_{number}")
    for node in traced.graph.nodes:
        if node in live:
            write.copy(node)
    for v, grad, found in zip(momenta, grads, sums, strict=True):
        if found is None:
            velocity = write.hold(v)
            write.graph.call_method("mul_", (velocity, momentum))
            write.graph.call_method("add_", (velocity, write.of(grad)))
        else:
            kind, velocity, left, right = found
            write.graph.call_method(kind, (write.hold(velocity), write.of(left), write.of(right)), {"beta": momentum})
    write.graph.output(write.of(loss))
    return write.function(traced)


class _Writer:
    """Writes the program: tensors that stand still become its first arguments, to be filled in once."""

    def __init__(self, still: Mapping[Any, Tensor], live: set[Any], needed: set[Any]) -> None:
        self.graph = fx.Graph()
        self.new: dict[Any, Any] = {}
        self._still, self._live, self._needed = still, live, needed
        self._held: list[Tensor] = []

    def hold(self, value: Tensor) -> Any:
        """A tensor that stands still."""
        self._held.append(value)
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            return self.graph.placeholder(f"still_{len(self._held)}")

    def of(self, node: Any) -> Any:
        """What stands for a node of the trace."""
        if node not in self.new:
            self.new[node] = self.hold(node if isinstance(node, Tensor) else self._still[node])
        return self.new[node]

    def copy(self, node: Any) -> None:
        """Write an operation, in the form that takes the least time."""
        arguments = fx.node.map_arg(node.args, self.of)
        if node.target in SAME:
            self.new[node] = arguments[0]
        elif node.target is aten.view.default:
            self.new[node] = self.graph.call_method("view", arguments)
        elif node.target in IN_PLACE and self._free(node.args[0], node):
            self.new[node] = self.graph.call_method(IN_PLACE[node.target], arguments, dict(node.kwargs))
        else:
            kwargs = fx.node.map_arg(node.kwargs, self.of)
            self.new[node] = self.graph.call_function(QUICK.get(node.target, node.target), arguments, kwargs)

    def _free(self, source: Any, user: Any) -> bool:
        """Whether an operation may write over its source: a fresh tensor like its result that no other reads."""
        if source in self._still or source in self._needed or not isinstance(source.target, OpOverload):
            return False
        if source.target is aten._unsafe_view.default or {one for one in source.users if one in self._live} != {user}:
            return False
        if any(result.alias_info is not None for result in source.target._schema.returns):
            return False  # a view, or written in place itself: its memory is another's
        a, b = source.meta["val"], user.meta["val"]
        return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())

    def function(self, traced: fx.GraphModule) -> Callable[..., Tensor]:
        """The program as a function of what does not stand still."""
        return partial(fx.GraphModule(traced, self.graph).forward, *reversed(self._held))


def _writes(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _draws(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _still(traced: fx.GraphModule, still: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """What is the same memory, or the same value, in every step: parameters, views on them, constants."""
    plain = not any(_writes(node) for node in traced.graph.nodes)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            still[node] = getattr(traced, node.target)
        elif node.op != "call_function":
            continue
        elif node.target in VIEWS | SAME and all(one in still for one in node.all_input_nodes):
            still[node] = node.target(*fx.node.map_arg(node.args, lambda one: still[one]), **node.kwargs)
        elif node.target in CONSTANT and plain:
            like = node.args[0].meta["val"]
            still[node] = node.target(torch.empty(like.shape, dtype=like.dtype), *node.args[1:])
    return still


def _as_product(grad: Any, v: Tensor) -> tuple[str, Tensor, Any, Any] | None:
    """A gradient that a momentum can take in by one product: (method, momentum, left, right); None if it cannot.

    For a weight matrix the product over the batch, the momentum turned if need be; for a bias the sum over
    the batch, as a product with ones.
    """
    flipped = False
    while grad.target in SAME | {aten.t.default}:
        flipped ^= grad.target is aten.t.default
        grad = grad.args[0]
    if grad.target is aten.mm.default and v.ndim == 2:
        return ("addmm_", v.t() if flipped else v, *grad.args)
    if grad.target is aten.view.default and v.ndim == 1 and grad.args[0].target is aten.sum.dim_IntList:
        source, dims = grad.args[0].args[:2]
        rows = source.meta["val"]
        if rows.ndim == 2 and dims == [0] and not grad.args[0].kwargs and source.target is not aten.t.default:
            return ("addmv_", v, _turned(source), torch.ones(rows.shape[0], dtype=rows.dtype))
    return None


def _turned(node: Any) -> Any:
    """The transpose of a node, which the trace may have already."""
    for user in node.users:
        if user.target is aten.t.default:
            return user
    with node.graph.inserting_after(node):
        turned = node.graph.call_function(aten.t.default, (node,))
    turned.meta["val"] = node.meta["val"].t()
    return turned


def _live(traced: fx.GraphModule, needed: set[Any], still: Mapping[Any, Tensor]) -> set[Any]:
    """The operations that must run: what is needed, what that needs, and all that writes or draws."""
    live = {node for node in traced.graph.nodes if node in needed or _writes(node) or _draws(node)}
    for node in reversed(traced.graph.nodes):
        if node in live and node not in still:
            live |= set(node.all_input_nodes)
    return {node for node in live if node not in still and node.op == "call_function"}
