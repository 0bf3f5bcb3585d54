"""The coverage of each parameter tensor, for the record of a round."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from fedcover.federation.history import LayerCoverage
from fedcover.params import HostCopy, alike


class LayerCounts:
    """The least coverage, the sum of coverages and the covered entries of tensors.

    A GPU computes them while the host continues.

    Args:
        counts: The number of holders of each entry.
        pruned: The tensors that some client prunes; all clients hold the others.
    """

    def __init__(self, counts: Mapping[str, Tensor], pruned: Collection[str]) -> None:
        self._sizes = {name: count.numel() for name, count in counts.items()}
        names = [name for name, size in self._sizes.items() if name in pruned and size]
        batches = alike([counts[name] for name in names])
        self._order = [names[n] for batch in batches for n in batch]
        facts = [_facts([counts[names[n]] for n in batch]) for batch in batches]
        self._values = HostCopy(torch.cat(facts)) if facts else None

    def by_tensor(self, clients: int) -> dict[str, LayerCoverage]:
        """Return the coverage of each tensor's entries.

        Args:
            clients: The number of clients.
        """
        values = dict(zip(self._order, self._values.tolist() if self._values else [], strict=True))
        layers = {}
        for name, size in self._sizes.items():
            all_hold = (clients, clients * size, size) if size else (0, 0, 0)
            least, total, covered = values.get(name, all_hold)
            layers[name] = LayerCoverage(least, total / max(size, 1), (size - covered) / max(size, 1))
        return layers


def _facts(counts: list[Tensor]) -> Tensor:
    """Return a row for each of some tensors of one shape."""
    rows = counts[0].reshape(1, -1) if len(counts) == 1 else torch.stack(counts).reshape(len(counts), -1)
    return torch.stack([rows.amin(1).long(), rows.sum(1), rows.count_nonzero(1)], 1)
