"""The call of a model: its inputs may be one tensor, a tuple or a dict, and its output needs not be one tensor."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from fedcover.data.inputs import Inputs
from fedcover.errors import InputError


def call_model(model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the scores of a model."""
    return scores_of(call_output(model, inputs))


def call_output(model: nn.Module, inputs: Inputs) -> Any:
    """Return the output of a model; a tuple is passed as ``model(*inputs)``, and a dict as ``model(**inputs)``."""
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def call_with(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """Return the scores of a model under other parameters than its own; its own are as before afterwards.

    A tensor that is at several places of the model has one of their names.
    """
    replaced: dict[str, Tensor] = {}
    for places in _places(model):
        name = next((place for place in places if place in parameters), None)
        replaced |= {place: parameters.get(place, parameters[name]) for place in places} if name else {}
    replaced |= {name: tensor for name, tensor in parameters.items() if name not in replaced}
    arguments, named = (inputs if isinstance(inputs, tuple) else (inputs,)), None
    if isinstance(inputs, dict):
        arguments, named = (), inputs
    return scores_of(functional_call(model, replaced, arguments, named, tie_weights=False))


def _places(model: nn.Module) -> list[list[str]]:
    """Return the places of each tensor of a model.

    A layer with several names counts once: torch's own search would replace its tensors for each name, and restore them
    to what the first replacement was.
    """
    places: dict[int, list[str]] = {}
    for path, layer in model.named_modules():
        for name, tensor in [*layer._parameters.items(), *layer._buffers.items()]:
            if tensor is not None:
                places.setdefault(id(tensor), []).append(f"{path}.{name}" if path else name)
    return list(places.values())


def scores_of(output: Any) -> Tensor:
    """Return the scores in a model's output: itself, its ``logits``, or the first element of a tuple.

    >>> import torch
    >>> scores_of((torch.ones(2), "hidden states")).tolist()
    [1.0, 1.0]

    Raises:
        InputError: If there is no tensor at that place.
    """
    scores = output
    if not isinstance(output, Tensor):
        if hasattr(output, "logits"):
            scores = output.logits
        elif isinstance(output, dict):
            scores = output.get("logits")
        elif isinstance(output, tuple | list) and output:
            scores = output[0]
    if not isinstance(scores, Tensor):
        raise InputError(
            f"the model returns a value of type {type(output).__name__}; return the scores as a tensor, as the first"
            f" element of a tuple, or as the attribute 'logits'"
        )
    return scores


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if there is none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
