"""What a model keeps between forward passes. Clients train copies of one model, so only parameters may change.

Batch norms are the exception, see ``structure/batch_norm.py``.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs, copy_of
from fedcover.errors import InputError
from fedcover.seeding import seeded
from fedcover.structure.calls import call_model, first_line

PLAIN = (bool, int, float, str, tuple, list, dict, set, type(None))
"""Types of attributes that are compared."""
CLOSE = 1e-4
"""The largest difference between the scores of two equal passes that counts as rounding, relative to the largest."""


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy of a model.

    Raises:
        InputError: If it cannot be copied or has no parameters that could be read and set.
    """
    name = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise InputError(f"the model {name} has parts in TorchScript; pass the modules that they were compiled from")
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise InputError(
            f"the model {name} cannot be copied: {first_line(error).rstrip('.')}; remove what it keeps from earlier"
            f" calls, such as activations in its attributes, or create it again"
        ) from error


def copy_with_same_parameters(model: nn.Module) -> nn.Module:
    """Return a copy of a model that has the model's own parameters, which take no more memory and must not change."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def moving_buffers(model: nn.Module, before: Mapping[str, Tensor], example: Inputs) -> tuple[str, ...]:
    """Return the buffers that forward passes in training mode change.

    The first pass may leave them as they are and a later one not, as in spectral norm, whose vectors have converged
    for the initial weights. Therefore another pass has other weights.

    Args:
        model: A model in training mode after a forward pass; its parameters and buffers are changed.
        before: Copies of its buffers from before that pass.
        example: A batch of inputs.
    """
    first = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if not first:
        return ()
    with seeded(0, "weights"), torch.no_grad():
        for tensor in model.parameters():
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand(tensor.shape).to(tensor.dtype))
        call_model(model, copy_of(example))
    return tuple(
        name
        for name, buffer in model.named_buffers()
        if name in first and not (torch.equal(buffer, first[name]) and torch.equal(buffer, before.get(name, buffer)))
    )


def check_stateless(model: nn.Module, example: Inputs) -> None:
    """Raise InputError if a forward pass in training mode changes what later ones return, other than through buffers.

    What a client trains would depend on the clients that were trained before it, and on the engine.

    Args:
        model: The model, which is not changed.
        example: A batch of inputs.
    """
    scratch = copy.deepcopy(model).cpu().train()
    first, before = _scores(scratch, example), plain_attributes(scratch)  # the first call may fill a cache
    if not first.numel():
        raise InputError(
            f"the model {type(model).__name__} returns scores of shape {tuple(first.shape)}, which have no entries;"
            f" give its output layer at least one unit (data whose labels are values have 0 classes)"
        )
    second, after = _scores(scratch, example), plain_attributes(scratch)
    changed = [name for name, value in after.items() if name not in before or before[name] != value]
    differs = first.shape != second.shape or bool((first - second).abs().max() > CLOSE * first.abs().max())
    if not changed and not differs:
        return
    name = type(model).__name__
    why = f"changes its attribute '{changed[0]}'" if changed else "returns other scores for the same inputs"
    raise InputError(
        f"the model {name} {why} whenever it is called in training mode, so that clients would not train"
        f" the same model; keep nothing from call to call, and draw random numbers from torch's default generator"
    )


def _scores(model: nn.Module, example: Inputs) -> Tensor:
    with seeded(0, "state"), torch.no_grad():
        return call_model(model, copy_of(example))


def plain_attributes(model: nn.Module) -> dict[str, Any]:
    """Return copies of the plain attributes of all modules, by name."""
    hidden = ("_parameters", "_buffers", "_modules")
    return {
        f"{path}.{name}" if path else name: copy.deepcopy(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and name not in hidden and not _has_tensor(value)
    }


def _has_tensor(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list | set) else ()
    return any(isinstance(item, Tensor) or callable(item) for item in inner)
