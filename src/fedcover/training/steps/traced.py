"""Traced training steps: a model is traced once to the operations of loss, gradients and momenta."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload

from fedcover.seeding import ambient
from fedcover.structure.calls import call_model, call_with
from fedcover.structure.dropout import DropoutCall, Stream

aten = torch.ops.aten

VIEWS = {aten.t.default, aten.transpose.int, aten.view.default, aten.expand.default, aten.permute.default}
VIEWS |= {aten.unsqueeze.default, aten.squeeze.dim, aten.select.int, aten.slice.Tensor}
"""Operations whose result is a view of their input."""
SAME = {aten.detach.default, aten.alias.default}
"""Operations that have no effect where no gradients are recorded."""
SHAPE_ONLY = {aten.ones_like.default, aten.zeros_like.default}
"""Operations whose result depends only on the shape of their input."""
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
"""Equivalent functions that take less time to call."""
IN_PLACE = {aten.mul.Tensor: "mul_", aten.add.Tensor: "add_", aten.relu.default: "relu_"}
"""Methods that overwrite their first input, for where nothing else needs it."""


@dataclass(frozen=True)
class TracedStep:
    """A traced step for one batch shape, bound to a model's parameters and momenta."""

    run: Callable[..., Tensor]
    """(x, y, momentum, multipliers of each dropout layer) -> loss; updates the momenta but not the parameters."""
    calls: tuple[DropoutCall, ...]
    """The dropout layers that a step calls."""


def trace_step(
    model: nn.Module,
    stream: Stream,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    momenta: Mapping[str, Tensor],
) -> TracedStep | None:
    """Return the traced step for batches of the shapes of (x, y); None if the model cannot be traced.

    Args:
        model: The model, with keyed dropout.
        stream: The stream of the model's dropout.
        loss: A function from (scores, labels) to the mean loss.
        x: A batch of inputs.
        y: A batch of labels.
        momenta: The velocity of each trained parameter.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # here, since it takes a second

    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    fixed = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name not in momenta}
    values = [*(model.get_parameter(name).detach() for name in trained), *fixed.values()]

    def step(x: Tensor, y: Tensor, *tensors: Tensor) -> list[Tensor]:
        parameters = [tensor.requires_grad_() for tensor in tensors[: len(trained)]]
        named = dict(zip([*trained, *fixed], [*parameters, *tensors[len(trained) :]], strict=False))
        stream.prepared = dict(zip(calls, tensors[len(values) :], strict=True))
        stream.step = 0
        value = loss(call_with(model, named, x), y)
        return [value, *torch.autograd.grad(value, parameters, materialize_grads=True)]

    try:
        with ambient(0, "trace"), torch.enable_grad():
            calls = dropout_calls(model, stream, x)
            drawn = [torch.ones(call.shape, dtype=call.dtype) for call in calls]
            inputs = [tensor.detach().clone() for tensor in values]
            graph = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(x, y, *inputs, *drawn)
    except MemoryError:
        raise
    except Exception:  # such as control flow that depends on data
        return None
    finally:
        stream.prepared = None
    return TracedStep(_build(graph, values, [momenta[name] for name in trained], len(calls)), calls)


def dropout_calls(model: nn.Module, stream: Stream, x: Tensor) -> tuple[DropoutCall, ...]:
    """Return the dropout layers that one forward pass calls."""
    stream.recorded.clear()
    stream.step = 0
    with torch.no_grad():
        call_model(model, x.clone())  # a model may modify its input
    return tuple(stream.recorded)


def _build(
    traced: fx.GraphModule, values: Sequence[Tensor], momenta: Sequence[Tensor], num_calls: int
) -> Callable[..., Tensor]:
    """Return the traced step as a function of (x, y, momentum, multipliers), with all constants bound."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    ((loss, *grads),) = next(node for node in traced.graph.nodes if node.op == "output").args
    constants = _constants(traced, dict(zip(inputs[2:], values, strict=False)))
    products = [_as_product(grad, v) for grad, v in zip(grads, momenta, strict=True)]
    needed = {loss, *(grad for grad, product in zip(grads, products, strict=True) if product is None)}
    needed |= {node for product in products if product for node in product[1:] if isinstance(node, fx.Node)}
    live = _live(traced, needed, constants)

    writer = _Writer(constants, live, needed)
    graph = writer.graph
    x, y, momentum = (graph.placeholder(name) for name in ("x", "y", "momentum"))
    writer.new |= {inputs[0]: x, inputs[1]: y}
    for number, node in enumerate(inputs[len(inputs) - num_calls :]):
        writer.new[node] = graph.placeholder(f"scale_{number}")
    for node in traced.graph.nodes:
        if node in live:
            writer.copy(node)
    for v, grad, product in zip(momenta, grads, products, strict=True):
        if product is None:
            velocity = writer.bind(v)
            graph.call_method("mul_", (velocity, momentum))
            graph.call_method("add_", (velocity, writer.of(grad)))
        else:
            method, velocity, left, right = product
            graph.call_method(method, (writer.bind(velocity), writer.of(left), writer.of(right)), {"beta": momentum})
    graph.output(writer.of(loss))
    return writer.function(traced)


class _Writer:
    """A writer of the new graph, in which constants are the first arguments, to be bound once."""

    def __init__(self, constants: Mapping[Any, Tensor], live: set[Any], needed: set[Any]) -> None:
        self.graph = fx.Graph()
        self.new: dict[Any, Any] = {}
        """The nodes of the new graph, by those of the trace."""
        self._constants, self._live, self._needed = constants, live, needed
        self._bound: list[Tensor] = []

    def bind(self, value: Tensor) -> Any:
        """Return a new argument for a constant."""
        self._bound.append(value)
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            return self.graph.placeholder(f"constant_{len(self._bound)}")

    def of(self, node: Any) -> Any:
        """Return the node of the new graph for a node of the trace, or for a tensor."""
        if node not in self.new:
            self.new[node] = self.bind(node if isinstance(node, Tensor) else self._constants[node])
        return self.new[node]

    def copy(self, node: Any) -> None:
        """Copy an operation, in the form that takes the least time."""
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
        """Return whether an operation may overwrite its source: a new tensor like its result, with no other user."""
        if source in self._constants or source in self._needed or not isinstance(source.target, OpOverload):
            return False
        if source.target is aten._unsafe_view.default or set(source.users) & self._live != {user}:
            return False
        if any(result.alias_info is not None for result in source.target._schema.returns):
            return False  # a view or the result of an in-place operation, which shares its memory
        a, b = source.meta["val"], user.meta["val"]
        return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())

    def function(self, traced: fx.GraphModule) -> Callable[..., Tensor]:
        """Return the new graph as a function, with its constants bound."""
        return partial(fx.GraphModule(traced, self.graph).forward, *reversed(self._bound))


def _writes(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _draws(node: Any) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _constants(traced: fx.GraphModule, values: dict[Any, Tensor]) -> dict[Any, Tensor]:
    """Return the tensors that are the same memory or value in every step: parameters, views of them, constants.

    Args:
        traced: The traced step.
        values: The tensors of its inputs; the result extends this dict.
    """
    plain = not any(_writes(node) for node in traced.graph.nodes)
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(traced, node.target)
        elif node.op != "call_function":
            continue
        elif node.target in VIEWS | SAME and all(source in values for source in node.all_input_nodes):
            values[node] = node.target(*fx.node.map_arg(node.args, lambda source: values[source]), **node.kwargs)
        elif node.target in SHAPE_ONLY and plain:
            like = node.args[0].meta["val"]
            values[node] = node.target(torch.empty(like.shape, dtype=like.dtype), *node.args[1:])
    return values


def _as_product(grad: Any, v: Tensor) -> tuple[str, Tensor, Any, Any] | None:
    """Return (method, momentum, left, right) if one product can add a gradient to its momentum; None otherwise.

    For a weight matrix it is the product over the batch, with the momentum transposed if necessary. For a bias it
    is the sum over the batch, as a product with ones.
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
            return ("addmv_", v, _transposed(source), torch.ones(rows.shape[0], dtype=rows.dtype))
    return None


def _transposed(node: Any) -> Any:
    """Return the transpose of a node, which may already be in the trace."""
    for user in node.users:
        if user.target is aten.t.default:
            return user
    with node.graph.inserting_after(node):
        transpose = node.graph.call_function(aten.t.default, (node,))
    transpose.meta["val"] = node.meta["val"].t()
    return transpose


def _live(traced: fx.GraphModule, needed: set[Any], constants: Mapping[Any, Tensor]) -> set[Any]:
    """Return the operations that must run: those needed, their inputs, and all that write in place or draw."""
    live = {node for node in traced.graph.nodes if node in needed or _writes(node) or _draws(node)}
    for node in reversed(traced.graph.nodes):
        if node in live and node not in constants:
            live |= set(node.all_input_nodes)
    return {node for node in live if node not in constants and node.op == "call_function"}
