"""Compilation of a step: it is traced to plain operations, which are then compiled and fused.

Tracing first removes Python objects (a dropout layer's stream, the dicts of parameters) that the compiler
cannot follow through vmap. On a GPU, the matrix products that dominate a step on small batches are then
replaced by the kernels of ``linear_kernels.py``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

aten = torch.ops.aten
MOST_EXAMPLES = 64
"""The largest batch for which the kernels are used: products over small batches are bound by reading the weights."""
LEAST_ENTRIES = 4096
"""The smallest weight matrix for which the kernels are used; smaller ones are left to the compiler."""


def compile_step(
    function: Callable[..., Tensor], arguments: tuple[Any, ...], kernels: bool = False
) -> Callable[..., Tensor]:
    """Return a step compiled for arguments of these shapes; what it changes in place is still changed in place.

    If the step cannot be compiled (no compiler, an operation that is not supported), it is called as it is.

    Args:
        function: The step, from nested containers of tensors to one tensor.
        arguments: Example arguments.
        kernels: Whether to use the kernels for linear layers; they need a GPU.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # here, since it takes a second

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
    works: bool | None = None  # None until the first call, at which the graph is compiled

    def run(*tensors: Any) -> Tensor:
        nonlocal works
        if works is False:
            return function(*tensors)
        try:
            result: Tensor = compiled(*pytree.tree_leaves(tensors))
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if works:
                raise
            works = False
            return function(*tensors)
        works = True
        return result

    return run


def use_kernels(module: fx.GraphModule) -> int:
    """Replace products in a traced step by the kernels, in place; return how many were replaced."""
    import fedcover.engines.vectorized.linear_kernels  # noqa: F401 - registers the operations

    kernels = torch.ops.fedcover
    graph, replaced = module.graph, 0
    for node in _calls(graph, aten.sub_.Tensor):
        replaced += _use_rank_step(graph, node, kernels.rank_step.default)
    graph.eliminate_dead_code()  # the gradients that are no longer read
    for node in _calls(graph, aten.bmm.default):
        weight, flipped = _resolve(node.args[1])
        if weight.op == "placeholder" and _is_worthwhile(weight, batch=node.meta["val"].shape[1]):
            product = kernels.forward_product if flipped else kernels.backward_product
            with graph.inserting_before(node):
                new = graph.call_function(product.default, (node.args[0], weight))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            replaced += 1
    graph.eliminate_dead_code()
    module.recompile()
    return replaced


def _calls(graph: fx.Graph, target: Any) -> list[Any]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is target]


def _use_rank_step(graph: fx.Graph, sub: Any, rank_step: Any) -> int:
    """Replace theta.sub_(v.mul_(momentum).add_(where(mask, grad, 0)) * scale) by ``rank_step``; return 1 or 0.

    The gradient must be a product over a batch. The mask may be missing.
    """
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
    if not _is_worthwhile(theta, batch=left.meta["val"].shape[2]):
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


def _is_worthwhile(weight: Any, batch: int) -> bool:
    value = weight.meta["val"]
    return bool(value.dtype == torch.float32 and value[0].numel() >= LEAST_ENTRIES and batch <= MOST_EXAMPLES)


def _resolve(node: Any) -> tuple[Any, bool]:
    """Return the node behind views that keep its shape, and whether these transpose it."""
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
