"""The part of a tensor that a client trains: rows and columns of it, or single entries in them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TrainedPart:
    """The entries of a tensor that a mask keeps, as a compact tensor.

    The compact tensor is the block of some rows and columns. If the mask keeps only some entries of that block, it is
    a vector of them. Rows are indices of the first axis, and columns are those of the second.
    """

    rows: Tensor | None
    """The rows with kept entries; None if all have."""
    columns: Tensor | None
    """The columns with kept entries; None if all have, or if there is only one axis."""
    entries: Tensor | None
    """The kept entries of the block of these rows and columns, as int32; None if all are kept."""

    @property
    def is_whole(self) -> bool:
        """Whether all entries are kept."""
        return self.rows is None and self.columns is None and self.entries is None

    @property
    def is_narrow(self) -> bool:
        """Whether no entry of some rows or columns is kept, so that products for the gradient are smaller."""
        return self.rows is not None or self.columns is not None

    def on_device(self, device: torch.device) -> "TrainedPart":
        """Return the part with its indices on a device."""
        indices = (self.rows, self.columns, self.entries)
        return TrainedPart(*(None if index is None else index.to(device) for index in indices))

    def cut(self, tensor: Tensor) -> Tensor:
        """Return the kept entries of a tensor; the tensor itself if all are kept."""
        return self.kept_of(take_rows(take_columns(tensor, self.columns), self.rows))

    def kept_of(self, block: Tensor) -> Tensor:
        """Return the kept entries of the block of rows and columns."""
        return block if self.entries is None else block.reshape(-1).index_select(0, self.entries)

    def put(self, whole: Tensor, compact: Tensor) -> None:
        """Write the kept entries into a contiguous tensor, in place."""
        if self.entries is None:
            self._put_block(whole, compact)
        elif not self.is_narrow:
            whole.view(-1).scatter_(0, self.entries.long(), compact)
        else:
            block = take_rows(take_columns(whole, self.columns), self.rows)
            self._put_block(whole, block.view(-1).scatter_(0, self.entries.long(), compact).view_as(block))

    def _put_block(self, whole: Tensor, block: Tensor) -> None:
        if self.columns is None:
            if self.rows is None:
                whole.copy_(block)
            else:
                whole.index_copy_(0, self.rows, block)
        elif self.rows is None:
            whole.index_copy_(1, self.columns, block)
        else:
            whole[self.rows.unsqueeze(1), self.columns] = block


def part_of(kept: Tensor) -> TrainedPart | None:
    """Return the part of a tensor that a mask keeps; None if it keeps nothing.

    >>> part = part_of(torch.tensor([[True, False, True], [False, False, False]]))
    >>> part.rows.tolist(), part.columns.tolist(), part.entries
    ([0], [0, 2], None)
    """
    if not bool(kept.any()):
        return None
    matrix = kept.reshape(1, -1) if kept.ndim == 0 else kept.reshape(len(kept), -1)
    rows = _indices(matrix.any(1))
    columns = _indices(matrix.any(0).view(kept.shape[1], -1).any(1)) if kept.ndim > 1 else None
    block = take_rows(take_columns(kept, columns), rows).reshape(-1)
    entries = None if bool(block.all()) else block.nonzero().squeeze(1).to(torch.int32)
    return TrainedPart(rows, columns, entries)


def take_rows(tensor: Tensor, rows: Tensor | None) -> Tensor:
    """Return some rows of a tensor; all for None."""
    return tensor if rows is None else tensor.index_select(0, rows)


def take_columns(tensor: Tensor, columns: Tensor | None) -> Tensor:
    """Return some columns of a tensor; all for None."""
    return tensor if columns is None else tensor.index_select(1, columns)


def _indices(kept: Tensor) -> Tensor | None:
    return None if bool(kept.all()) else kept.nonzero().squeeze(1)
