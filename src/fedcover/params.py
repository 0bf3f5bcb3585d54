"""Parameters and masks: dicts of tensors over a plain module's ``named_parameters()``.

A mask is data: one bool tensor for each parameter tensor that it touches. A name left out is kept
whole, so ``{}`` is the full model. theta o m is the meaning of a pruned model.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.errors import InputError

Params = dict[str, Tensor]
Mask = Mapping[str, Tensor]

FULL: Mask = MappingProxyType({})
"""The mask of the whole model, which is read-only."""


def params_of(model: nn.Module) -> Params:
    """Return a detached copy of a module's parameters, by name.

    >>> sorted(params_of(nn.Linear(2, 1)))
    ['bias', 'weight']
    """
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def put_params(model: nn.Module, theta: Mapping[str, Tensor]) -> None:
    """Copy values into a module's parameters, in place."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(theta[name])


def prune(theta: Mapping[str, Tensor], mask: Mask) -> Params:
    """Return theta o m: the entries that the mask keeps, and exact zeros elsewhere, even in place of NaN.

    >>> prune({"w": torch.tensor([1.0, float("nan")])}, {"w": torch.tensor([True, False])})["w"].tolist()
    [1.0, 0.0]
    """
    return {
        name: torch.where(mask[name], tensor, torch.zeros_like(tensor)) if name in mask else tensor.clone()
        for name, tensor in theta.items()
    }


def count(theta: Mapping[str, Tensor], mask: Mask = FULL) -> int:
    """Return the number of entries that the mask keeps.

    >>> count({"w": torch.zeros(4), "b": torch.zeros(2)}, {"w": torch.tensor([True, False, False, True])})
    4
    """
    return sum(int(mask[name].sum()) if name in mask else tensor.numel() for name, tensor in theta.items())


def norm2(theta: Mapping[str, Tensor]) -> float:
    """Return ||theta||^2, the sum of squares over all entries, in double precision."""
    return float(sum(numbers([tensor.double().square().sum() for tensor in theta.values()])))


def numbers(scalars: Sequence[Tensor]) -> list[Any]:
    """Return tensors of one entry and one type as numbers, with a single transfer from the device."""
    return torch.stack(list(scalars)).tolist() if scalars else []


def on_device(tensors: Mapping[str, Tensor], device: torch.device) -> Params:
    """Return the tensors on a device; tensors that are already there are not copied."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def device_of(theta: Mapping[str, Tensor]) -> torch.device:
    """Return the device of theta."""
    return next(iter(theta.values())).device


def all_finite(theta: Mapping[str, Tensor], mask: Mask = FULL) -> bool:
    """Return whether every entry that the mask keeps is finite."""
    return all(bool(torch.isfinite(t[mask[name]] if name in mask else t).all()) for name, t in theta.items())


def check_mask(mask: object, theta: Mapping[str, Tensor], whose: str) -> None:
    """Raise InputError unless a mask fits theta: names of parameters, and bool tensors of their shapes and devices.

    Args:
        mask: Mask to check.
        theta: Parameters by name; only shapes and devices are read.
        whose: Subject of the message, such as "the mask of client 3".
    """
    if not isinstance(mask, Mapping):
        raise InputError(f"{whose} is a {type(mask).__name__}; return a dict from parameter name to bool tensor")
    for name, kept in mask.items():
        if name not in theta:
            raise InputError(
                f"{whose} names '{name}', which is not a parameter of the model; it has {', '.join(theta)}"
            )
        if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
            kind = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
            raise InputError(f"{whose} is {kind} for '{name}'; make it a bool tensor, such as `scores > threshold`")
        if kept.shape != theta[name].shape:
            raise InputError(
                f"{whose} has shape {tuple(kept.shape)} for '{name}', whose shape is {tuple(theta[name].shape)};"
                f" return one bool for each entry"
            )
        if kept.device != theta[name].device:
            raise InputError(
                f"{whose} is on {kept.device} for '{name}', which is on {theta[name].device}; move it there"
            )
