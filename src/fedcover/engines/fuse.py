"""A step as one fused program: traced to plain operations, then compiled.

Tracing first takes the Python objects out (a dropout layer's stream, the dicts of parameters), which
the compiler could not follow through vmap.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree


def fused(function: Callable[..., Tensor], arguments: tuple[Any, ...]) -> Callable[..., Tensor]:
    """The function, compiled for arguments like these; what it does in place it still does in place.

    Where it cannot be compiled (no compiler, an operation that is not supported) it stays as it is.
    """
    flat, spec = pytree.tree_flatten(arguments)

    def plain(*tensors: Tensor) -> Tensor:
        return function(*pytree.tree_unflatten(list(tensors), spec))

    compiled = torch.compile(make_fx(plain, tracing_mode="fake")(*flat), dynamic=False, fullgraph=True)

    works: bool | None = None  # not known before the first call

    def run(*given: Any) -> Tensor:
        nonlocal works
        if works is False:
            return function(*given)
        try:
            found: Tensor = compiled(*pytree.tree_leaves(given))
        except Exception:
            if works:
                raise
            works = False
            return function(*given)
        works = True
        return found

    return run
