"""What the forward passes of two models must share, apart from the values of parameters, to compute the same."""

from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes of modules that have hooks."""
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The names of attributes that all modules have."""
SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
"""Types whose values are compared as they are."""
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, type)
"""Types whose values equal only themselves."""


class Same:
    """A key that equals only keys of the same object. The object lives as long as the key, so its id is not reused."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def model_key(model: nn.Module) -> Any:
    """Return a key that two models share if their forward passes are the same functions of their parameters.

    >>> key = model_key(nn.Linear(2, 3))
    >>> key == model_key(nn.Linear(2, 3)), key == model_key(nn.Linear(2, 4))
    (True, False)
    """
    return _model_key(model, (id(model),))


def _model_key(model: nn.Module, outer: tuple[int, ...]) -> Any:
    shapes = tuple((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters())
    return repr(model), shapes, tuple(_module_key(module, outer) for module in model.modules())


def _module_key(module: nn.Module, outer: tuple[int, ...]) -> Any:
    """Return what a forward pass may depend on apart from parameters: type, attributes, buffers and hooks."""
    hooks = tuple(Same(hook) for hooks in HOOKS for hook in getattr(module, hooks).values())
    own = [(name, value) for name, value in vars(module).items() if name not in OF_EVERY_MODULE]
    values = tuple((name, _value_key(value, outer)) for name, value in [*own, *module._buffers.items()])
    return type(module), hooks, values


def _value_key(value: object, outer: tuple[int, ...]) -> Any:
    """Return a key of an attribute, which equals that of another if copies of both are alike.

    Args:
        value: The attribute, or a part of one.
        outer: The ids of the objects that it is a part of.
    """
    if isinstance(value, SIMPLE):
        return type(value), value
    if isinstance(value, FUNCTIONS) or id(value) in outer:
        return Same(value)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1)
        return Tensor, tuple(value.shape), value.dtype, flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return np.ndarray, value.shape, value.dtype.str, value.tobytes()
    outer = (*outer, id(value))
    if isinstance(value, nn.Module):  # one that is hidden in a list has parameters that nobody trains
        return _model_key(value, outer), tuple((name, _value_key(p.data, ())) for name, p in value.named_parameters())
    if type(value) in (list, tuple):
        return type(value), tuple(_value_key(part, outer) for part in cast(Iterable[object], value))
    if type(value) is dict:
        return dict, tuple((_value_key(key, outer), _value_key(part, outer)) for key, part in value.items())
    try:
        parts = value.__reduce_ex__(4)  # what a copy is made of
        listed = [tuple(part) if isinstance(part, Iterator) else part for part in cast(tuple[object, ...], parts)]
        return type(value), tuple(_value_key(part, outer) for part in listed)
    except Exception:  # such as a file or a lock, which cannot be copied
        return Same(value)
