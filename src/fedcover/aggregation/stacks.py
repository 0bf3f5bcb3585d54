"""Trained values of many clients in one tensor, restored to the shapes of the whole model only where they are read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from fedcover.params import FixedMask, Mask, Params


@dataclass(frozen=True, eq=False)
class Positions:
    """Where the entries of a sub-model are among the entries of all parameters of the whole model."""

    index: Tensor
    """The position of each entry of the sub-model, each once."""
    exact: "ref[FixedMask] | None" = None
    """The mask that keeps exactly these entries, if one is known. The mask may store the positions."""

    def are_of(self, mask: Mask) -> bool:
        """Return whether a mask is the one that keeps exactly these entries."""
        return self.exact is not None and self.exact() is mask


@dataclass(frozen=True, eq=False)
class ClientStack:
    """The trained values of clients, all of one length: whole models, or sub-models of equal shapes."""

    values: Tensor
    """A row for each client, with its entries in the order of the parameters."""
    positions: Sequence[Positions | None]
    """For each client where its entries belong; None for whole models."""
    like: Params
    """Tensors of the shapes of the whole model, in the order of its parameters."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters, in their order."""
        return tuple(self.like)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The number of entries before and up to the end of each tensor, among those of the whole model."""
        ends = list(accumulate((tensor.numel() for tensor in self.like.values()), initial=0))
        return {name: (ends[i], ends[i + 1]) for i, name in enumerate(self.like)}

    def rows(self) -> list["StackRow"]:
        """Return the values of each client by name."""
        return [StackRow(self, row) for row in range(len(self.values))]


class StackRow(Mapping[str, Tensor]):
    """The values of one client of a stack in the shapes of the whole model, with exact zeros outside its sub-model."""

    def __init__(self, stack: ClientStack, row: int) -> None:
        self.stack, self.row = stack, row

    @cached_property
    def whole(self) -> Tensor:
        """The client's values as one tensor over all entries of the whole model; built on first use."""
        values, positions = self.stack.values[self.row], self.stack.positions[self.row]
        if positions is None:
            return values
        size = sum(tensor.numel() for tensor in self.stack.like.values())
        whole = values.new_zeros(size).index_copy_(0, positions.index, values)
        self._version = whole._version
        return whole

    def is_changed(self) -> bool:
        """Return whether restored values were changed in place, so that they are no longer those of the stack."""
        return "_version" in vars(self) and self.whole._version != self._version

    def __getitem__(self, name: str) -> Tensor:
        start, end = self.stack.spans[name]
        return self.whole[start:end].view(self.stack.like[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stack.like)

    def __len__(self) -> int:
        return len(self.stack.like)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ({name: tensor.clone() for name, tensor in self.items()},)  # without the rest of the stack


def flat_rows(stacks: Mapping[str, Tensor]) -> Tensor | None:
    """Return stacks of parameters as one row for each client; None if their types differ."""
    if len({stack.dtype for stack in stacks.values()}) != 1:
        return None
    return torch.cat([stack.reshape(len(stack), -1) for stack in stacks.values()], 1)


def parts_of_rows(rows: Tensor, like: Mapping[str, Tensor]) -> Params:
    """Return the stacks of which ``flat_rows`` are the rows, as views of them."""
    parts = rows.split([stack[0].numel() for stack in like.values()], 1)
    return {name: part.view(stack.shape) for (name, stack), part in zip(like.items(), parts, strict=True)}
