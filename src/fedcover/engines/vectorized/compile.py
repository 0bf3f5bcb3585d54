"""A step as one fused program: traced to plain operations, then compiled.

Tracing first takes the Python objects out (a dropout layer's stream, the dicts of parameters), which
the compiler could not follow through vmap. On a GPU the products that dominate a small-batch step
are then given to kernels of our own (``kernels.py``).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten
MOST_EXAMPLES = 64
"""Batches up to this size are small: their products are bound by reading the weights."""
LEAST_ENTRIES = 4096
"""Weights of fewer entries are left to the compiler."""


def fused(function: Callable[..., Tensor], arguments: tuple[Any, ...], kernels: bool = False) -> Callable[..., Tensor]:
    """The function, compiled for arguments like these; what it does in place it still does in place.

    Where it cannot be compiled (no compiler, an operation that is not supported) it stays as it is.
    """
    flat, spec = pytree.tree_flatten(arguments)

    def plain(*tensors: Tensor) -> Tensor:
        return function(*pytree.tree_unflatten(list(tensors), spec))

    try:
        graph = make_fx(plain, tracing_mode="fake", _allow_non_fake_inputs=True)(*flat)
        if kernels:
            use_kernels(graph)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return function
    compiled = torch.compile(graph, dynamic=False, fullgraph=True)
    works: bool | None = None  # not known before the first call

    def run(*given: Any) -> Tensor:
        nonlocal works
        if works is False:
            return function(*given)
        try:
            found: Tensor = compiled(*pytree.tree_leaves(given))
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if works:
                raise
            works = False
            return function(*given)
        works = True
        return found

    return run


def use_kernels(module: fx.GraphModule) -> int:
    """How many products of a traced step were given to the kernels, in place."""
    import fedcover.engines.vectorized.linear_kernels  # noqa: F401 - it registers the operations

    ours = torch.ops.fedcover
    graph, done = module.graph, 0
    for node in _calls(graph, aten.sub_.Tensor):
        done += _use_rank_step(graph, node, ours.rank_step.default)
    graph.eliminate_dead_code()  # the gradients that nothing reads any more
    for node in _calls(graph, aten.bmm.default):
        weight, flipped = _resolve(node.args[1])
        if weight.op == "placeholder" and _worth(weight, batch=node.meta["val"].shape[1]):
            product = ours.forward_product if flipped else ours.backward_product
            with graph.inserting_before(node):
                new = graph.call_function(product.default, (node.args[0], weight))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            done += 1
    graph.eliminate_dead_code()
    module.recompile()
    return done


def _calls(graph: fx.Graph, target: Any) -> list[Any]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def _use_rank_step(graph: fx.Graph, sub: Any, rank_step: Any) -> int:
    """Recognise theta.sub_(v.mul_(momentum).add_(where(mask, grad, 0)) * scale) with grad a product over a batch."""
    theta, change = sub.args
    if theta.op != "placeholder" or len(theta.meta["val"].shape) != 3 or change.target is not aten.mul.Tensor:
        return 0
    add, scale = change.args
    if not isinstance(scale, fx.Node) or add.target is not aten.add_.Tensor:
        return 0
    scaled, grad = add.args
    if scaled.target is not aten.mul_.Tensor or isinstance(scaled.args[1], fx.Node):
        return 0
    velocity, momentum = scaled.args
    mask = None
    if grad.target is aten.where.self:
        mask, grad, _ = grad.args
    product, flipped = _resolve(grad)
    if product.target is not aten.bmm.default:
        return 0
    left, right = product.args
    if not _worth(theta, batch=left.meta["val"].shape[2]):
        return 0
    with graph.inserting_before(sub):
        # grad = A B over the batch, or its transpose B^T A^T.
        d = right if flipped else graph.call_function(aten.transpose.int, (left, 1, 2))
        x = graph.call_function(aten.transpose.int, (left, 1, 2)) if flipped else right
        flat = graph.call_function(aten.reshape.default, (scale, [-1]))
        graph.call_function(rank_step, (theta, velocity, mask, d, x, flat, momentum))
    for node in (sub, change, add, scaled):
        graph.erase_node(node)
    return 1


def _worth(weight: Any, batch: int) -> bool:
    value = weight.meta["val"]
    return bool(value.dtype == torch.float32 and value[0].numel() >= LEAST_ENTRIES and batch <= MOST_EXAMPLES)


def _resolve(node: Any) -> tuple[Any, bool]:
    """The tensor behind views that change nothing, and whether it is transposed on the way."""
    flipped = False
    while node.op == "call_function":
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is None:
            break
        same = tuple(source.meta["val"].shape) == tuple(node.meta["val"].shape)
        if node.target is aten.transpose.int and set(node.args[1:]) == {1, 2}:
            flipped = not flipped
        elif not (node.target in (aten.view.default, aten._unsafe_view.default, aten.expand.default) and same):
            break
        node = source
    return node, flipped
