"""The coverage of each parameter tensor, for the record of a round."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from fedcover.federation.history import LayerCoverage
from fedcover.params import HostCopy, alike


class LayerCounts:
    """The least coverage, the sum of coverages, the covered entries and their least coverage, of some tensors.

    A GPU computes them while the host continues.

    Args:
        sizes: The number of entries of each tensor.
        names: The tensors whose counts there are; all clients hold the others.
        counts: The four numbers of each of them.
        run: The number of the run, if the counts are those of several.
    """

    def __init__(
        self, sizes: Mapping[str, int], names: Sequence[str], counts: HostCopy | None, run: int | None = None
    ) -> None:
        self._sizes, self._names, self._counts, self._run = sizes, names, counts, run

    def by_tensor(self, clients: int) -> dict[str, LayerCoverage]:
        """Return the coverage of each tensor's entries.

        Args:
            clients: The number of clients.
        """
        values, layers = self._values, {}
        for name, size in self._sizes.items():
            all_hold = (clients, clients * size, size, clients) if size else (0, 0, 0, 0)
            least, total, covered, _ = values.get(name, all_hold)
            layers[name] = LayerCoverage(least, total / max(size, 1), (size - covered) / max(size, 1))
        return layers

    def least_covered(self, clients: int) -> int:
        """Return the least coverage of the entries with a holder; 0 if no entry has one.

        Args:
            clients: The number of clients.
        """
        values = self._values
        covered = [values.get(name, (0, 0, size, clients)) for name, size in self._sizes.items()]
        return min((least for *_, number, least in covered if number), default=0)

    @cached_property
    def _values(self) -> dict[str, Sequence[int]]:
        """Return the numbers of the tensors that have some."""
        rows = self._counts.tolist() if self._counts else []
        return dict(zip(self._names, rows if self._run is None else rows[self._run], strict=True))


def layer_counts(counts: Mapping[str, Tensor], pruned: Collection[str]) -> LayerCounts:
    """Return the coverage of tensors.

    Args:
        counts: The number of holders of each entry.
        pruned: The tensors that some client prunes.
    """
    sizes = {name: count.numel() for name, count in counts.items()}
    names = [name for name, size in sizes.items() if name in pruned and size]
    batches = alike([counts[name] for name in names])
    rows = [[counts[names[n]].reshape(1, -1) for n in batch] for batch in batches]
    facts = [count_rows(one[0] if len(one) == 1 else torch.cat(one)) for one in rows]
    order = [names[n] for batch in batches for n in batch]
    return LayerCounts(sizes, order, HostCopy(torch.cat(facts)) if facts else None)


def count_rows(rows: Tensor) -> Tensor:
    """Return of each row the least number, the sum, how many numbers are not 0, and the least of those."""
    covered = rows.masked_fill(rows == 0, torch.iinfo(rows.dtype).max)
    return torch.stack([rows.amin(1).long(), rows.sum(1), rows.count_nonzero(1), covered.amin(1).long()], 1)
