"""What the forward passes of two models must share, apart from the values of parameters, to compute the same."""

from typing import Any

from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of modules that have hooks."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The names of attributes that all modules have."""


def model_key(model: nn.Module) -> Any:
    """Return a key that two models share if their forward passes are the same functions of their parameters.

    >>> key = model_key(nn.Linear(2, 3))
    >>> key == model_key(nn.Linear(2, 3)), key == model_key(nn.Linear(2, 4))
    (True, False)
    """
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    return repr(model), shapes, tuple(map(_module_key, model.modules()))


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
