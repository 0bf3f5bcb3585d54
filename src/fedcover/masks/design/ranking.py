"""A list ranked by energy, largest first and ties by index.

Only the energies are sorted, once, as numbers. Which items are the first t is computed from the t-th energy, since only
a few values of t are needed.
"""

import numpy as np
import torch
from torch import Tensor


class Ranking:
    """The items ordered by energy: which of them are the first t, and the sum of their energies.

    >>> ranking = Ranking(torch.tensor([1.0, 9.0, 4.0, 4.0]))
    >>> ranking.first(2).tolist(), ranking.energy(2)
    ([False, True, True, False], 13.0)
    """

    def __init__(self, energies: Tensor) -> None:
        items = energies.flatten()
        self._items = items if items.dtype in (torch.float32, torch.float64) else items.float()
        if energies.device.type == "cpu":  # numpy sorts numbers many times faster
            ordered = torch.from_numpy(np.sort(self._items.numpy()))
        else:
            ordered = self._items.sort().values
        self._ordered = ordered.flip(0)
        self._sums = self._ordered.cumsum(0, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self._items)

    def energy(self, count: float) -> float:
        """Return the total energy of the first ``count`` items."""
        return float(self._sums[int(count) - 1]) if count else 0.0

    def first(self, count: int) -> Tensor:
        """Return a boolean tensor that marks the first ``count`` items."""
        if not 0 < count < len(self):
            return torch.full_like(self._items, count > 0, dtype=torch.bool)
        last = self._ordered[count - 1]
        chosen = self._items > last
        ties = (self._items == last).nonzero().flatten()
        chosen[ties[: count - int(chosen.sum())]] = True
        return chosen

    def between(self, start: int, end: int) -> Tensor:
        """Return the indices of the items of ranks ``start`` to ``end`` - 1, in ascending order of index."""
        chosen = self.first(end)
        return (chosen & ~self.first(start) if start else chosen).nonzero().flatten()
