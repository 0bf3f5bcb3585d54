"""Batches of clients with similar numbers of steps, since a client that has ended costs as much as one that trains."""

from collections.abc import Sequence

FEWEST, FEWEST_ON_GPU = 4, 16
"""The fewest clients of a batch; with fewer, a step takes hardly less time."""
SAVING = 0.2
"""The share of the work that two batches must save in place of one."""


def of_similar_length(numbers: Sequence[int], steps: Sequence[int], fewest: int) -> list[list[int]]:
    """Return jobs in batches such that few steps are taken by clients that have ended.

    Args:
        numbers: The numbers of the jobs.
        steps: How many steps each of them takes.
        fewest: The fewest jobs of a batch that has only a part of them.

    >>> of_similar_length([4, 5, 6, 7], [10, 100, 12, 90], fewest=2)
    [[5, 7], [4, 6]]
    >>> of_similar_length([4, 5, 6, 7], [80, 100, 82, 90], fewest=2)
    [[4, 5, 6, 7]]
    """
    order = sorted(range(len(numbers)), key=lambda place: -steps[place])
    longest = [steps[place] for place in order]
    work = len(order) * max(longest, default=0)
    cuts = range(fewest, len(order) - fewest + 1)
    cut = min(cuts, key=lambda at: _work(longest, at), default=0)
    if not cut or _work(longest, cut) > (1 - SAVING) * work:
        return [list(numbers)]
    parts = (sorted(order[:cut]), sorted(order[cut:]))
    return [
        batch
        for part in parts
        for batch in of_similar_length([numbers[p] for p in part], [steps[p] for p in part], fewest)
    ]


def _work(longest: Sequence[int], cut: int) -> int:
    """Return the steps of all clients, in order of their lengths, if the first ``cut`` are a batch."""
    return cut * longest[0] + (len(longest) - cut) * longest[cut]
