"""Operations on stacks of clients, for models that are written for one client."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def over_stacks(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of one client's tensors, which vmap calls as an operation on stacks of clients.

    Args:
        operation: A function of stacks, whose first axis is the client, and of other arguments.
    """

    class OnStacks(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: Any) -> Any:
            stacks = (value[None] if isinstance(value, Tensor) else value for value in arguments)
            results = operation(*stacks)
            return tuple(result[0] for result in results) if isinstance(results, tuple) else results[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            pass

        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
            def stack(value: Any, dim: int | None) -> Any:
                if not isinstance(value, Tensor):
                    return value
                return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

            results = operation(*map(stack, arguments, in_dims))
            return results, tuple(0 for _ in results) if isinstance(results, tuple) else 0

    return OnStacks.apply
