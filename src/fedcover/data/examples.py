"""Examples: inputs with their targets, in memory or read when they are needed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fedcover.data.inputs import Inputs, cast_inputs, count, map_inputs, parts_of, take, to_device
from fedcover.data.items import Items
from fedcover.data.tensors import INPUTS, TARGETS, as_indices, as_input, as_target, as_tensor
from fedcover.errors import InputError
from fedcover.seeding import seeded

IGNORED = -100
"""A class number that is not a label, as of padding; ``F.cross_entropy`` leaves it out by default, and so do
accuracies and label counts."""

Augmentation = Callable[[Inputs, torch.Generator], Inputs]
"""A function that changes a batch of inputs at random, drawing only from the generator."""


@dataclass(frozen=True)
class Examples:
    """Inputs with their targets, and their provenance.

    Args:
        inputs: A tensor N x ... of float32, float64, bool, or int64 such as token numbers; a tuple or a dict of such
            tensors, with which the model is called as ``model(*inputs)`` or ``model(**inputs)``; or ``Items``.
        labels: The targets, of any shape N x ...: int64 class numbers, with -100 for positions to ignore, or float32
            or float64 values. None for ``Items`` whose targets are not single class numbers.
        classes: The number of classes, with class numbers in 0..classes-1; 0 if the targets are not class numbers.
        name: Name of the data set, for messages and records.
        provenance: Sentence on the origin of the data.
        licence: The licence and its holders, for records.
        augment: A function that changes each batch of inputs in training, from addressed randomness.

    Raises:
        InputError: If types, shapes or labels are not valid; ``as_examples`` converts other types.

    >>> few = Examples(torch.zeros(3, 1, 8, 8), torch.tensor([0, 2, 2]), classes=3)
    >>> len(few), few.label_counts().tolist()
    (3, [1, 0, 2])
    """

    inputs: Inputs | Items
    labels: Tensor | None
    classes: int
    name: str = "examples"
    provenance: str = "given by the caller"
    licence: str = ""
    augment: Augmentation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.inputs, Items):
            for name, part in parts_of(self.inputs).items():
                self._check_type(f"inputs {name}".strip(), part, INPUTS)
            self._check_type("labels", self.labels, TARGETS)
        if self.labels is None:
            return
        parts = [self.inputs] if isinstance(self.inputs, Items) else parts_of(self.inputs).values()
        sizes = {len(part) for part in parts}
        if sizes != {len(self.labels)}:
            counts = f"{' and '.join(map(str, sorted(sizes)))} inputs and {len(self.labels)} labels"
            raise InputError(f"{self.name} must have one label for each input; got {counts}; drop the surplus")
        if len(self.labels) == 0:
            raise InputError(f"{self.name} has no examples; give at least one")
        if self.labels.is_floating_point() or not self.labels.numel():
            if self.classes:
                raise InputError(f"labels of {self.name} are values, which have no classes; got classes={self.classes}")
            return
        counted = self.labels[self.labels != IGNORED]
        low, high = (int(end) for end in counted.aminmax()) if len(counted) else (0, 0)
        if low < 0 or high >= self.classes:
            worst = low if low < 0 else high
            raise InputError(f"labels of {self.name} must be in 0..{self.classes - 1}; got {worst}; renumber them")

    def _check_type(self, part: str, value: object, dtypes: Sequence[torch.dtype]) -> None:
        if not isinstance(value, Tensor) or value.dtype not in dtypes or value.ndim < 1:
            kind = value.dtype if isinstance(value, Tensor) and value.ndim else type(value).__name__
            valid = " or ".join(str(dtype) for dtype in dtypes)
            raise InputError(f"{part} of {self.name} must be {valid}; got {kind}; convert with as_examples")

    def __len__(self) -> int:
        return len(self.inputs) if isinstance(self.inputs, Items) else count(self.inputs)

    @property
    def in_memory(self) -> bool:
        """False if items are read when they are needed."""
        return not isinstance(self.inputs, Items)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input; raise InputError unless inputs are one tensor."""
        first = self.read(slice(1))[0]
        if not isinstance(first, Tensor):
            raise InputError(f"{self.name} has several inputs, and the named models take one; use a model of your own")
        return tuple(first.shape[1:])

    @property
    def fixed(self) -> bool:
        """True if an example is the same in every epoch: in memory, and not augmented."""
        return self.in_memory and self.augment is None

    def read(self, rows: Tensor | slice) -> tuple[Inputs, Tensor]:
        """Return the inputs and the targets of some rows, not augmented."""
        if isinstance(self.inputs, Items):
            chosen = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
            return self.inputs.read(chosen)
        assert self.labels is not None
        labels = (
            self.labels[rows] if isinstance(rows, slice) else self.labels.index_select(0, rows.to(self.labels.device))
        )
        return take(self.inputs, rows), labels

    def augmented(self, augment: Augmentation | None) -> "Examples":
        """Return examples whose inputs a function changes in training, as ``fedcover.data.random_crop_flip()``."""
        return replace(self, augment=augment)

    def cast(self, dtype: torch.dtype, whole_numbers: bool = False) -> "Examples":
        """Return examples whose floating-point inputs have a type; whole numbers too if asked."""
        if isinstance(self.inputs, Items):
            return replace(self, inputs=replace(self.inputs, dtype=dtype, whole_numbers=whole_numbers))
        return replace(self, inputs=cast_inputs(self.inputs, dtype, whole_numbers))

    def example(self) -> Inputs:
        """Return two inputs, with which a model can be traced."""
        with seeded(0, "example"):
            return self.read(slice(2))[0]

    def tensors(self) -> tuple[Inputs, Tensor]:
        """Return all inputs and targets of data in memory."""
        assert not isinstance(self.inputs, Items)
        assert self.labels is not None
        return self.inputs, self.labels

    def on_device(self, device: torch.device) -> "Examples":
        """Return examples on a device; the same object if they are there, or if they are read when needed."""
        if isinstance(self.inputs, Items):
            return self
        inputs, labels = self.tensors()
        if all(tensor.device == device for tensor in (*parts_of(inputs).values(), labels)):
            return self
        return replace(self, inputs=to_device(inputs, device), labels=labels.to(device))

    def subset(self, indices: "Tensor | np.ndarray[Any, Any] | Sequence[int]") -> "Examples":
        """Return the examples at these indices, in this order, in memory.

        Args:
            indices: Flat integers in 0..N-1.

        Raises:
            InputError: If an index is out of range, or if there is none.

        >>> Examples(torch.zeros(3, 2), torch.tensor([0, 1, 2]), 3).subset([2, 0]).labels.tolist()
        [2, 0]
        """
        chosen = as_indices(indices, len(self), f"a subset of {self.name}")
        if not len(chosen):
            raise InputError(f"a subset of {self.name} has no examples; give at least one")
        if self.labels is not None:
            chosen = chosen.to(self.labels.device)
        inputs, labels = self.read(chosen)
        return replace(self, inputs=inputs, labels=labels)

    def part(self, indices: Tensor) -> "Examples":
        """Return the examples at these indices: a copy, or still on disk for a lazy data set."""
        if not isinstance(self.inputs, Items):
            return self.subset(indices)
        items = replace(self.inputs, dataset=Subset(self.inputs.dataset, indices.tolist()))
        return replace(self, inputs=items, labels=None if self.labels is None else self.labels[indices])

    @property
    def has_classes(self) -> bool:
        """Whether the labels are class numbers that can be counted: neither values, nor read with each item."""
        return self.labels is not None and self.classes > 0

    def class_labels(self) -> Tensor:
        """Return the class numbers; raise InputError if the targets are not class numbers that can be counted."""
        if self.labels is None or not self.classes:
            reason = "are read with each item" if self.labels is None else f"are {self.labels.dtype} values"
            raise InputError(
                f"the targets of {self.name} {reason}, and not class numbers that can be counted, which a partition by"
                f" labels, a policy or a weighting asks for; pass integers as class numbers"
            )
        return self.labels

    def label_counts(self) -> Tensor:
        """Return the number of labels of each class (int64, one entry per class).

        >>> Examples(torch.zeros(2, 1), torch.tensor([1, 1]), classes=2).label_counts().tolist()
        [0, 2]
        """
        return count_labels(self.class_labels(), self.classes)


def count_labels(labels: Tensor, classes: int) -> Tensor:
    """Return the number of labels of each class, without those to ignore."""
    flat = labels.flatten()
    counted = flat != IGNORED
    # On a GPU, nothing here waits for it.
    return torch.zeros(classes, dtype=torch.long, device=flat.device).index_add_(
        0, torch.where(counted, flat, 0), counted.long()
    )


def as_examples(data: object) -> Examples:
    """Return data as ``Examples``.

    float32, float64, bool and int64 inputs stay as they are, other integers of 16 and 32 bits become int64, and all
    other types, such as bytes, float32; nothing is scaled. Integer labels are class numbers, and floating-point labels
    are values.

    Args:
        data: ``Examples``; a pair (inputs, labels) of tensors, arrays or lists, where the inputs may be a tuple or a
            dict of these; or a map-style data set of torch or Hugging Face, which is read when needed. The number of
            classes is that of the data set's ``classes`` if it has them, otherwise the largest label plus one.

    Raises:
        InputError: If the data is of another kind, or not finite, or if inputs and labels do not fit.

    >>> as_examples((np.zeros((4, 2)), [0, 1, 1, 2])).classes
    3
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise InputError(f"data must be a pair (inputs, labels); got {len(data)} parts; pass exactly two")
        return _from_pair(data[0], data[1])
    if isinstance(data, TensorDataset) and len(data.tensors) > 1:
        *inputs, labels = data.tensors
        return _from_pair(inputs[0] if len(inputs) == 1 else tuple(inputs), labels)
    if _is_dataset(data):
        return _from_dataset(data)
    kind = type(data).__name__
    hint = "; pass its dataset, loader.dataset" if isinstance(data, DataLoader) else ""
    raise InputError(
        f"data must be Examples, a pair (inputs, labels) or a torch Dataset with a length; got {kind}{hint}"
    )


def _is_dataset(data: object) -> bool:
    sized = callable(getattr(data, "__len__", None)) and callable(getattr(data, "__getitem__", None))
    of_a_kind = isinstance(data, Dataset) or hasattr(data, "column_names")
    return sized and of_a_kind and not isinstance(data, IterableDataset)


def _from_dataset(data: Any) -> Examples:
    items = Items(data)
    if not len(items):
        raise InputError("the dataset has no examples; give at least one")
    labels = items.targets()
    names = getattr(data, "classes", None)
    listed = len(names) if isinstance(names, list | tuple) else 0
    classes = max(_largest(labels) + 1, listed) if labels is not None else 0
    return Examples(items, labels, classes, name=type(data).__name__)


def _from_pair(inputs: object, labels: object) -> Examples:
    y = as_target(as_tensor(labels, "labels"))
    if y.ndim < 1:
        raise InputError("labels must be one for each example; got a single number; pass a list")
    x: Inputs
    if isinstance(inputs, dict):
        x = {str(name): as_input(as_tensor(part, f"inputs '{name}'")) for name, part in inputs.items()}
    elif isinstance(inputs, tuple) and all(isinstance(part, Tensor | np.ndarray) for part in inputs):
        x = tuple(as_input(as_tensor(part, "inputs")) for part in inputs)
    else:
        x = as_input(as_tensor(inputs, "inputs"))
    map_inputs(_check_finite, x)
    _check_finite(y, "labels")
    return Examples(x, y, 0 if y.is_floating_point() else _largest(y) + 1)


def _largest(labels: Tensor) -> int:
    return max(int(labels.max()), 0) if labels.numel() else 0


def _check_finite(x: Tensor, what: str = "inputs") -> Tensor:
    # A finite sum proves every entry finite and needs no mask as large as the data.
    if x.is_floating_point() and not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        first = int((~torch.isfinite(x)).nonzero()[0][0])
        raise InputError(f"{what} must be finite; got nan or infinity at example {first}; repair or drop it")
    return x
