"""Gradients that can be mapped over clients, without torch's compiler.

The first call of ``torch.func.grad_and_value`` imports torch._dynamo and sympy, 800 modules in all, for other functions
of the same file. Gradients themselves need only levels of differentiation, which ``vmap`` nests in the same way.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as levels
from torch.utils import _pytree as pytree

from fedcover.params import Params

NEEDED = (
    "_grad_increment_nesting",
    "_grad_decrement_nesting",
    "_wrap_for_grad",
    "_unwrap_for_grad",
    "get_inplace_requires_grad_allowed",
    "set_inplace_requires_grad_allowed",
)
"""The private functions of torch that are called; without one of them, ``torch.func`` is."""
NO_HOOKS = "gradients of several clients at once do not support saved tensor hooks"


def grad_and_value(loss: Callable[..., Tensor]) -> Callable[..., tuple[Params, Tensor]]:
    """Return a function from the arguments of a loss to its gradients by the first argument, and its value.

    It computes what ``torch.func.grad_and_value`` does, by the same operations.

    Args:
        loss: A function from a dict of tensors, and further arguments, to a tensor without axes.

    >>> gradients, value = grad_and_value(lambda p, x: (p["w"] * x).sum())({"w": torch.ones(2)}, torch.arange(2.0))
    >>> gradients["w"].tolist(), value.item()
    ([0.0, 1.0], 1.0)
    """
    if not all(hasattr(levels, name) for name in NEEDED):
        return torch.func.grad_and_value(loss)

    def gradients_of(parameters: Params, *arguments: Any) -> tuple[Params, Tensor]:
        level = levels._grad_increment_nesting()
        try:
            with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(NO_HOOKS):
                wrapped, others = pytree.tree_map_only(
                    Tensor, lambda tensor: levels._wrap_for_grad(tensor, level), (parameters, arguments)
                )
                _require_gradients(wrapped)
                value = loss(wrapped, *others)
                gradients = _gradients(value, wrapped)
            unwrapped = {name: levels._unwrap_for_grad(gradient, level) for name, gradient in gradients.items()}
            return unwrapped, levels._unwrap_for_grad(value, level)
        finally:
            levels._grad_decrement_nesting()

    return gradients_of


def _require_gradients(tensors: Params) -> None:
    """Let a level compute gradients by its tensors; models inside it must not ask for that."""
    before = levels.get_inplace_requires_grad_allowed()
    levels.set_inplace_requires_grad_allowed(True)
    try:
        for tensor in tensors.values():
            tensor.requires_grad_()
    finally:
        levels.set_inplace_requires_grad_allowed(before)


def _gradients(value: Tensor, tensors: Params) -> Params:
    """Return the gradients by all tensors, which are 0 for those that the value does not depend on."""
    if not (value.requires_grad and tensors):
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    # With a graph of its own, since the backward pass would otherwise turn off the gradients of outer levels.
    each = torch.autograd.grad(value, list(tensors.values()), create_graph=True, allow_unused=True)
    pairs = zip(tensors.items(), each, strict=True)
    return {name: torch.zeros_like(tensor) if grad is None else grad for (name, tensor), grad in pairs}
