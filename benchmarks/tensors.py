"""Examples whose inputs are one tensor, as those of all benchmarks are."""

from torch import Tensor

from fedcover.data import Examples


def tensors_of(examples: Examples) -> tuple[Tensor, Tensor]:
    """Return all inputs and labels."""
    inputs, labels = examples.tensors()
    assert isinstance(inputs, Tensor)
    return inputs, labels
