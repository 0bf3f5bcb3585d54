"""A batch of inputs: one tensor, a tuple of tensors, or a dict of tensors, all with one row per example."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""A model is called with a tensor as its only argument, with a tuple as ``model(*inputs)``, and with a dict as
``model(**inputs)``."""


def parts_of(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors of inputs by name; a single tensor has the empty name.

    >>> list(parts_of((torch.zeros(2), torch.zeros(2))))
    ['0', '1']
    """
    if isinstance(inputs, Tensor):
        return {"": inputs}
    return inputs if isinstance(inputs, dict) else {str(number): part for number, part in enumerate(inputs)}


def map_inputs(function: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return inputs of the same form, with a function applied to each tensor."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, dict):
        return {name: function(part) for name, part in inputs.items()}
    return tuple(function(part) for part in inputs)


def count(inputs: Inputs) -> int:
    """Return the number of rows."""
    return len(next(iter(parts_of(inputs).values())))


def take(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """Return some rows.

    >>> take({"x": torch.arange(4)}, slice(2))["x"].tolist()
    [0, 1]
    """
    if isinstance(rows, slice):
        return map_inputs(lambda part: part[rows], inputs)
    return map_inputs(lambda part: part.index_select(0, rows.to(part.device)), inputs)


def join(batches: Sequence[Inputs]) -> Inputs:
    """Return batches of the same form as one."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat([part for batch in batches for part in parts_of(batch).values()])
    names = parts_of(first)
    joined = {name: torch.cat([parts_of(batch)[name] for batch in batches]) for name in names}
    return joined if isinstance(first, dict) else tuple(joined.values())


def copy_of(inputs: Inputs) -> Inputs:
    """Return a copy, for a model that may write to its input."""
    return map_inputs(torch.clone, inputs)


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Return inputs on a device."""
    return map_inputs(lambda part: part.to(device), inputs)


def cast_inputs(inputs: Inputs, dtype: torch.dtype, whole_numbers: bool) -> Inputs:
    """Return inputs whose floating-point parts have a type; whole numbers too if asked."""
    return map_inputs(lambda part: part.to(dtype) if part.is_floating_point() or whole_numbers else part, inputs)


def shapes(inputs: Inputs) -> str:
    """Return the shapes of inputs in words.

    >>> shapes({"text": torch.zeros(2, 5), "age": torch.zeros(2)})
    'text (2, 5) and age (2,)'
    """
    return " and ".join(f"{name} {tuple(part.shape)}".strip() for name, part in parts_of(inputs).items())
