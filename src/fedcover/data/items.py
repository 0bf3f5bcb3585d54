"""Lazy data: a data set whose items are read when they are needed, so that memory does not grow with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from fedcover.data.inputs import Inputs, cast_inputs, parts_of
from fedcover.data.tensors import as_input, as_target, as_tensor
from fedcover.errors import InputError
from fedcover.seeding import seeded

TARGETS = ("label", "labels", "target", "targets", "y")
"""The keys of the target in items that are dicts, and the attributes in which data sets list their targets."""


@dataclass(frozen=True, eq=False)
class Items:
    """The items of a data set with ``__len__`` and ``__getitem__``, read again each time.

    An item is a pair (x, y), a tuple whose last element is the target, or a dict with one of the keys ``TARGETS``. x
    may itself be a tuple or a dict. ``__getitem__`` may draw random numbers, as for augmentation: torch, numpy and
    Python's generators are seeded before each batch, by its address.
    """

    dataset: Any
    dtype: torch.dtype | None = None
    """The type of floating-point inputs; None for their own."""
    whole_numbers: bool = False
    """Whether whole numbers get that type too."""

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Return the inputs and targets of some items, in this order."""
        batch = getattr(self.dataset, "__getitems__", None)
        items: Any
        if callable(batch):
            try:
                items = batch(list(rows))
            except Exception as error:
                raise _unreadable(error, rows[0]) from error
        else:
            items = [self._item(row) for row in rows]
        if isinstance(items, Mapping):  # columns, as of Hugging Face's datasets
            items = [{name: column[n] for name, column in items.items()} for n in range(len(rows))]
        pairs = [split_item(item, row) for item, row in zip(items, rows, strict=True)]
        inputs, targets = _stack([x for x, _ in pairs], rows), _one_shape([y for _, y in pairs], rows, "targets")
        for part in (*parts_of(inputs).values(), targets):
            if part.is_floating_point() and not bool(torch.isfinite(part).all()):
                item = next(row for row, values in zip(rows, part, strict=True) if not bool(values.isfinite().all()))
                raise InputError(f"items must be finite; got nan or infinity in item {item}; repair or drop it")
        return cast_inputs(inputs, self.dtype, self.whole_numbers) if self.dtype else inputs, targets

    def _item(self, row: int) -> Any:
        try:
            return self.dataset[row]
        except Exception as error:
            raise _unreadable(error, row) from error

    def targets(self) -> Tensor | None:
        """Return the class number of every item; None if targets are not single class numbers.

        They are those that the data set lists, if it lists those of its items, or else all items are read once.
        """
        with seeded(0, "items"):
            first = split_item(self._item(0), 0)[1]
            if first.numel() != 1 or first.is_floating_point():
                return None
            listed = _listed(self.dataset)
            if listed is not None:
                places = {0, len(self) // 2, len(self) - 1}
                if all(int(listed[row]) == int(split_item(self._item(row), row)[1]) for row in places):
                    return listed
            return torch.stack([split_item(self._item(row), row)[1].reshape(()) for row in range(len(self))])


def _unreadable(error: Exception, row: int) -> InputError:
    return InputError(f"item {row} of the data set cannot be read ({type(error).__name__}: {error}); fix the data set")


def split_item(item: Any, row: int) -> tuple[Inputs, Tensor]:
    """Return the input and the target of an item."""
    if isinstance(item, Mapping):
        key = next((key for key in TARGETS if key in item), None)
        if key is None or len(item) < 2:
            raise InputError(
                f"item {row} of the data set must have a target under one of the keys {', '.join(TARGETS)}, and an"
                f" input; got the keys {', '.join(map(str, item))}; rename them"
            )
        rest = {name: value for name, value in item.items() if name != key}
        x, y = rest if len(rest) > 1 else next(iter(rest.values())), item[key]
    elif isinstance(item, tuple | list) and len(item) > 1:
        x, y = item[0] if len(item) == 2 else tuple(item[:-1]), item[-1]
    else:
        kind = type(item).__name__
        raise InputError(f"item {row} of the data set must be a pair (x, y); got {kind}; wrap the data set")
    return _input(x, row), as_target(as_tensor(y, f"y of item {row}"))


def _input(x: Any, row: int) -> Inputs:
    if isinstance(x, Mapping):
        return {str(name): as_input(as_tensor(_array(part), f"'{name}' of item {row}")) for name, part in x.items()}
    if isinstance(x, tuple):
        return tuple(as_input(as_tensor(_array(part), f"x of item {row}")) for part in x)
    return as_input(as_tensor(_array(x), f"x of item {row}"))


def _array(value: Any) -> Any:
    """Return an image of Pillow as channels x height x width in [0, 1]; any other value as it is."""
    if not hasattr(value, "getbands"):
        return value
    if value.mode in ("1", "P"):  # bits, and numbers of colours
        value = value.convert("L" if value.mode == "1" else "RGB")
    if value.mode not in ("L", "LA", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise InputError(f"images of Pillow's mode {value.mode} have no fixed range; convert them to tensors yourself")
    pixels = torch.from_numpy(np.array(value))
    return (pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.movedim(-1, 0)).float() / 255


def _stack(rows: list[Inputs], numbers: Sequence[int]) -> Inputs:
    first = rows[0]
    if isinstance(first, dict):
        return {name: _one_shape([row[name] for row in rows], numbers, f"'{name}'") for name in first}  # type: ignore[index, call-overload]
    if isinstance(first, tuple):
        return tuple(_one_shape([row[n] for row in rows], numbers, "inputs") for n in range(len(first)))  # type: ignore[index]
    return _one_shape(rows, numbers, "inputs")  # type: ignore[arg-type]


def _one_shape(tensors: list[Tensor], numbers: Sequence[int], what: str) -> Tensor:
    """Return tensors stacked; raise InputError, naming the item, unless they have one shape."""
    for tensor, number in zip(tensors, numbers, strict=True):
        if tensor.shape != tensors[0].shape:
            shapes = f"{tuple(tensor.shape)} at item {number}, {tuple(tensors[0].shape)} at item {numbers[0]}"
            raise InputError(f"the {what} of a data set must have one shape; got {shapes}; resize or pad them")
    return torch.stack(tensors)


def _listed(dataset: Any) -> Tensor | None:
    """Return the targets that a data set lists, one for each item; None if it does not."""
    if isinstance(dataset, Subset):
        whole = _listed(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices)]
    for name in TARGETS:
        values = getattr(dataset, name, None)
        if isinstance(values, list | tuple | np.ndarray | Tensor) and len(values) == len(dataset):
            try:
                targets = as_target(as_tensor(values, name))
            except InputError:
                continue
            if targets.ndim == 1 and not targets.is_floating_point():
                return targets
    if hasattr(dataset, "column_names") and hasattr(dataset, "with_format"):  # Hugging Face's datasets
        for column in [name for name in TARGETS if name in dataset.column_names]:
            return as_target(as_tensor(dataset.with_format("numpy")[column][:], column))
    return None
