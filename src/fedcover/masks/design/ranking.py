"""A list ranked by energy, largest first and ties by index.

Its energies are sorted once, as numbers; the items themselves are not: which of them are among the first t is read off
the t-th energy, since that is asked at a few places only.
"""

import numpy as np
import torch
from torch import Tensor


class Ranking:
    """Which items are among the first t, and how much energy they hold.

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
        """The energy of the first items."""
        return float(self._sums[int(count) - 1]) if count else 0.0

    def first(self, count: int) -> Tensor:
        """Which items are among the first."""
        if not 0 < count < len(self):
            return torch.full_like(self._items, count > 0, dtype=torch.bool)
        last = self._ordered[count - 1]
        chosen = self._items > last
        ties = (self._items == last).nonzero().flatten()
        chosen[ties[: count - int(chosen.sum())]] = True
        return chosen

    def between(self, start: int, end: int) -> Tensor:
        """The indices of the items from one place to before another, in their own order."""
        chosen = self.first(end)
        return (chosen & ~self.first(start) if start else chosen).nonzero().flatten()
