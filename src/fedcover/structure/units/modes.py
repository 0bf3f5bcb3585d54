"""Training mode and evaluation mode of a model: units must be the same in both."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from fedcover.structure.dropout import silent_dropout

Step = tuple[str, Any, dict[str, Any], Any]
"""An operation of a forward pass: the module that runs, the function, its arguments and its result."""

_PLAIN = ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
_DROPOUTS = frozenset(
    [getattr(torch, name + end) for name in _PLAIN for end in ("", "_")]
    + [getattr(F, name) for name in (*_PLAIN, "dropout1d", "dropout2d", "dropout3d") if hasattr(F, name)]
)


class WithoutDropout(TorchFunctionMode):
    """A context without dropout: a smaller copy draws other numbers, which agree only in distribution."""

    def __enter__(self) -> "WithoutDropout":
        self._silent = silent_dropout()
        self._silent.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._silent.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return func(*args, **kwargs)


def set_mode(model: nn.Module, training: bool, batch_norm: bool = False) -> nn.Module:
    """Set the mode of a model and return it; layers of torch stay in evaluation mode.

    These differ between modes only by dropout, and by the statistics of batch norm.

    Args:
        model: Model to change.
        training: Training mode, or evaluation mode.
        batch_norm: In training mode, normalise by the statistics of each batch.
    """
    model.train(training)
    for module in model.modules() if training else ():
        statistics = batch_norm and isinstance(module, _BatchNorm)
        module.training = statistics or not type(module).__module__.startswith("torch.nn.modules.")
    return model


def same_program(first: Iterable[Step], second: Iterable[Step], model: nn.Module) -> bool:
    """Return whether two forward passes of a model apply the same operations to the same tensors."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return _program(first, own) == _program(second, own)


def _program(steps: Iterable[Step], own: set[int]) -> list[object]:
    """Return the operations with numbers in place of tensors, except for the model's own."""
    numbers: dict[int, int] = {}

    def written(value: Any) -> object:
        if isinstance(value, Tensor):
            place = id(value) if id(value) in own else numbers.setdefault(id(value), -1 - len(numbers))
            return place, value.shape, value.dtype
        return tuple(map(written, value)) if isinstance(value, list | tuple) else value

    return [
        (func, [(name, written(value)) for name, value in args.items()], written(out)) for _, func, args, out in steps
    ]
