"""Limits on the walk through torch-pruning's dependency graph, which need not end by itself.

torch-pruning follows indices from operation to operation until it meets a pair of operation and indices again. Where an
operation on a cycle changes the indices each time, as a residual addition of shuffled channels does, that never
happens, and lists of indices may grow without bound. The limits are checked each time the walk crosses an edge of the
graph, in the thread that walks.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

MOST_INDICES = 1 << 22
"""Longest list of indices that is followed; one index for each flattened feature of a model is far less."""

Mapping = Callable[[Sequence[Any]], Sequence[Any]]


class WalkLimitError(Exception):
    """The walk through a dependency graph took too long or followed too many indices."""


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def check(self) -> None:
        """Raise WalkLimitError if the time is over."""
        if time.monotonic() > self._end:
            raise WalkLimitError(f"timed out after {self.seconds:g} s")


class _LimitedMappings(list[Mapping | None]):
    """The index mappings of one edge; the walk iterates over them whenever it crosses the edge."""

    def __init__(self, mappings: Sequence[Mapping | None], deadline: _Deadline) -> None:
        super().__init__(mappings)
        self._deadline = deadline

    def __iter__(self) -> Iterator[Mapping | None]:
        self._deadline.check()
        for mapping in super().__iter__():
            yield None if mapping is None else partial(_apply, mapping)


def _apply(mapping: Mapping, indices: Sequence[Any]) -> Sequence[Any]:
    # A flatten turns each index into as many as its stride, and its reverse does the opposite.
    growth = 1 if getattr(mapping, "reverse", False) else getattr(mapping, "_stride", 1)
    if len(indices) * growth > MOST_INDICES:
        raise WalkLimitError(f"more than {MOST_INDICES} indices belong to one layer")
    return mapping(indices)


def limit_walk(graph: Any, seconds: float) -> None:
    """Make walks through a torch-pruning ``DependencyGraph`` raise WalkLimitError beyond the limits.

    Args:
        graph: A built graph, changed in place.
        seconds: Time that all walks together may take from now on.
    """
    deadline = _Deadline(seconds)
    for node in graph.module2node.values():
        for edge in node.dependencies:
            edge.index_mapping = _LimitedMappings(edge.index_mapping, deadline)
