"""The indices of the clients' examples on a device: a client's do not change, so they are copied there once."""

from collections.abc import Sequence

import torch

from fedcover.data import Population
from fedcover.training.client import Job

MOST_KEPT = 1 << 24
"""The number of indices beyond which those of clients that are not trained now are dropped."""


class ClientIndices:
    """The indices of clients that were trained on a device, one after another in one tensor."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clear()

    def clear(self) -> None:
        """Drop all indices."""
        self._starts: dict[tuple[Population, int], int] = {}
        self._used = 0
        self.all = torch.empty(0, dtype=torch.long, device=self.device)
        """The indices, with room for further ones at the end."""

    def starts(self, jobs: Sequence[Job]) -> list[int]:
        """Return where the indices of each job's client start in ``all``."""
        keys = [(job.population, job.client.id) for job in jobs]
        new = [key for key in dict.fromkeys(keys) if key not in self._starts]
        if new:
            if self._used + sum(population.size(client) for population, client in new) > MOST_KEPT:
                self._leave()
                self.clear()
                new = list(dict.fromkeys(keys))
            self._add(new)
        return [self._starts[key] for key in keys]

    def _add(self, keys: Sequence[tuple[Population, int]]) -> None:
        parts = [population.indices(client) for population, client in keys]
        for key, part in zip(keys, parts, strict=True):
            self._starts[key] = self._used
            self._used += len(part)
        added = torch.empty(sum(map(len, parts)), dtype=torch.long, pin_memory=self.device.type == "cuda")
        torch.cat(parts, out=added)
        before = self._used - len(added)
        if self._used > len(self.all):
            self._leave()
            larger = self.all.new_empty(max(self._used, 2 * len(self.all)))
            larger[:before] = self.all[:before]
            self.all = larger
        self.all[before : self._used].copy_(added, non_blocking=True)

    def _leave(self) -> None:
        """Keep the memory of the present tensor until the work that reads it is done."""
        if self.device.type == "cuda":
            self.all.record_stream(torch.cuda.current_stream(self.device))
