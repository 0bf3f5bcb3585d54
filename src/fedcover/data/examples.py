"""Labelled examples as two tensors, and the conversion of users' data to them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fedcover.errors import InputError

INPUTS = (torch.float32, torch.float64, torch.int64)
"""The types that inputs may have."""


@dataclass(frozen=True)
class Examples:
    """Inputs with their labels, and their provenance.

    Args:
        inputs: Tensor N x ... of float32, float64, or int64 such as token numbers.
        labels: int64 tensor of N labels, or of the shape of the inputs, as the next character at each position of a
            text.
        classes: Number of classes; labels are in 0..classes-1.
        name: Name of the data set, for messages and records.
        provenance: Sentence on the origin of the data.

    Raises:
        InputError: If types, shapes or labels are not valid; ``as_examples`` converts other types.

    >>> few = Examples(torch.zeros(3, 1, 8, 8), torch.tensor([0, 2, 2]), classes=3)
    >>> len(few), few.label_counts().tolist()
    (3, [1, 0, 2])
    """

    inputs: Tensor
    labels: Tensor
    classes: int
    name: str = "examples"
    provenance: str = "given by the caller"

    def __post_init__(self) -> None:
        for part, value, dtypes in (("inputs", self.inputs, INPUTS), ("labels", self.labels, (torch.int64,))):
            if not isinstance(value, Tensor) or value.dtype not in dtypes:
                kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
                valid = " or ".join(str(dtype) for dtype in dtypes)
                raise InputError(f"{part} of {self.name} must be {valid}; got {kind}; convert with as_examples")
        per_position = self.labels.shape == self.inputs.shape and self.labels.ndim > 1 and self.labels[0].numel() != 1
        if (self.labels.ndim != 1 and not per_position) or self.inputs.ndim < 1:
            shapes = f"inputs {tuple(self.inputs.shape)} and labels {tuple(self.labels.shape)}"
            raise InputError(f"{self.name} must have inputs N x ... and labels N; got {shapes}; reshape them")
        if len(self.inputs) != len(self.labels):
            counts = f"{len(self.inputs)} inputs and {len(self.labels)} labels"
            raise InputError(f"{self.name} must have one label for each input; got {counts}; drop the surplus")
        if len(self.labels) == 0:
            raise InputError(f"{self.name} has no examples; give at least one")
        low, high = (int(end) for end in self.labels.aminmax())
        if low < 0 or high >= self.classes:
            worst = low if low < 0 else high
            raise InputError(f"labels of {self.name} must be in 0..{self.classes - 1}; got {worst}; renumber them")

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, indices: "Tensor | np.ndarray[Any, Any] | Sequence[int]") -> "Examples":
        """Return the examples at these indices, in this order.

        Args:
            indices: Flat integers in 0..N-1.

        Raises:
            InputError: If an index is out of range, or if there is none.

        >>> Examples(torch.zeros(3, 2), torch.tensor([0, 1, 2]), 3).subset([2, 0]).labels.tolist()
        [2, 0]
        """
        chosen = as_indices(indices, len(self), f"a subset of {self.name}").to(self.labels.device)
        return replace(self, inputs=self.inputs[chosen.to(self.inputs.device)], labels=self.labels[chosen])

    def label_counts(self) -> Tensor:
        """Return the number of labels of each class (int64, one entry per class).

        >>> Examples(torch.zeros(2, 1), torch.tensor([1, 1]), classes=2).label_counts().tolist()
        [0, 2]
        """
        return torch.bincount(self.labels.flatten(), minlength=self.classes)


def as_indices(indices: object, length: int, owner: str) -> Tensor:
    """Return indices as a flat int64 tensor; raise InputError unless all are in 0..length-1.

    Args:
        indices: Tensor, array or list of integers.
        length: Number of examples.
        owner: Whose indices they are, for the message.

    >>> as_indices([0, 2], 3, "a subset").tolist()
    [0, 2]
    """
    tensor = as_tensor(indices, f"the indices of {owner}")
    if tensor.ndim != 1:
        raise InputError(f"the indices of {owner} must be flat; got the shape {tuple(tensor.shape)}; flatten them")
    if len(tensor) and (tensor.dtype == torch.bool or tensor.is_floating_point() or tensor.is_complex()):
        raise InputError(f"the indices of {owner} must be integers; got {tensor.dtype}; for a mask pass its nonzero()")
    flat = tensor.to(torch.int64)
    if len(flat):
        low, high = (int(end) for end in flat.aminmax())
        if low < 0 or high >= length:
            worst = low if low < 0 else high
            raise InputError(f"the indices of {owner} must be in 0..{length - 1}; got {worst}; drop or renumber it")
    return flat


def as_tensor(value: object, name: str) -> Tensor:
    """Return a value as a tensor; raise InputError with its name if that is not possible."""
    try:
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            return torch.tensor(value)  # torch cannot share memory that must not be written
        return torch.as_tensor(cast(Any, value))
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise InputError(f"{name} must be a tensor, an array or a list of numbers; got {kind} ({error})") from error


def as_labels(labels: object) -> Tensor:
    """Return labels as an int64 tensor; raise InputError unless all are whole numbers of 0 or more.

    >>> as_labels([2.0, 0.0]).tolist()
    [2, 0]
    """
    y = as_tensor(labels, "labels")
    if y.ndim < 1:
        raise InputError("labels must be one class number for each example; got a single number; pass a list")
    if y.is_complex() or (y.is_floating_point() and bool((y != y.round()).any())):
        raise InputError("labels must be whole numbers; got fractions; pass class numbers 0, 1, 2, ...")
    y = y.to(torch.int64)
    if y.numel() and int(y.min()) < 0:
        raise InputError(f"labels must be 0 or more; got {int(y.min())}; renumber the classes")
    return y


def as_examples(data: object) -> Examples:
    """Return data as ``Examples``.

    float32, float64 and int64 inputs stay as they are, other integers of 16 and 32 bits become int64, and all other
    types, such as bytes, float32; nothing is scaled.

    Args:
        data: ``Examples``, a pair (inputs, labels) of tensors, arrays or lists, or a map-style torch dataset of
            (x, y) pairs. The number of classes is that of the dataset's ``classes`` if it has them, otherwise the
            largest label plus one.

    Raises:
        InputError: If the data is of another kind, or not finite, or if inputs and labels do not fit.

    >>> as_examples((np.zeros((4, 2)), [0, 1, 1, 2])).classes
    3
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, (tuple, list)):
        if len(data) != 2:
            raise InputError(f"data must be a pair (inputs, labels); got {len(data)} parts; pass exactly two")
        return _from_pair(data[0], data[1], None)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset) and callable(getattr(data, "__len__", None)):
        return _from_dataset(data)
    kind = type(data).__name__
    raise InputError(f"data must be Examples, a pair (inputs, labels) or a torch Dataset with a length; got {kind}")


def _from_dataset(data: Any) -> Examples:
    pairs = []
    for index in range(len(data)):
        item = data[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            kind = type(item).__name__
            raise InputError(f"item {index} of the dataset must be a pair (x, y); got {kind}; wrap the dataset")
        pairs.append((as_tensor(item[0], f"x of item {index}"), as_tensor(item[1], f"y of item {index}")))
    if not pairs:
        raise InputError("the dataset has no examples; give at least one")
    for index, (x, y) in enumerate(pairs):
        if x.shape != pairs[0][0].shape:
            shapes = f"{tuple(x.shape)} at item {index}, {tuple(pairs[0][0].shape)} at item 0"
            raise InputError(f"the inputs of a dataset must have one shape; got {shapes}; resize them")
        if y.numel() != 1:
            raise InputError(f"y of item {index} must be a class number; got the shape {tuple(y.shape)}; pass one")
    classes = getattr(data, "classes", None)
    names = len(classes) if isinstance(classes, (list, tuple)) else None
    return _from_pair(torch.stack([x for x, _ in pairs]), torch.stack([y.reshape(()) for _, y in pairs]), names)


def _from_pair(inputs: object, labels: object, classes: int | None) -> Examples:
    x, y = as_tensor(inputs, "inputs"), as_labels(labels)
    if x.dtype not in INPUTS:
        x = x.to(torch.int64 if x.dtype in (torch.int16, torch.int32) else torch.float32)
    # A finite sum proves every entry finite and needs no mask as large as the data.
    if x.is_floating_point() and not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        first = int((~torch.isfinite(x)).nonzero()[0][0])
        raise InputError(f"inputs must be finite; got nan or infinity at example {first}; repair or drop it")
    largest = int(y.max()) + 1 if y.numel() else 1
    return Examples(x, y, max(largest, classes or 1))
