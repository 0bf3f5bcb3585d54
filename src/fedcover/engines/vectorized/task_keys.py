"""What tasks must share so that their models can be computed as one batch."""

from typing import Any

from torch import Tensor, nn

from fedcover.training.steps.chains import HOOKS
from fedcover.training.task import Task

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The names of attributes that all modules have."""


def task_key(task: Task) -> Any:
    """Return what tasks must share for their clients to be trained as one batch."""
    model = task.model
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    return (repr(model), shapes, tuple(map(_module_key, model.modules())), id(task.loss))


def _module_key(module: nn.Module) -> Any:
    """Return what a forward pass may depend on apart from parameters: type, attributes, buffers and hooks."""
    parts: list[Any] = [id(hook) for hooks in HOOKS for hook in getattr(module, hooks).values()]
    own = [(name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    for name, value in [*own, *module._buffers.items()]:
        if isinstance(value, Tensor):
            parts.append((name, value.dtype, value.detach().cpu().numpy().tobytes()))
        else:
            parts.append((name, id(value) if callable(value) else repr(value)))
    return type(module), tuple(parts)
