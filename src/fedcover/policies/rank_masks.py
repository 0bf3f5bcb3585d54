"""Masks of single weights by their ranks: those of all budgets are one buffer, which takes a few operations."""

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from fedcover.budgets import Budget
from fedcover.params import FULL, FixedMask, Mask, Params, device_of, to_device

MOST = 1 << 28
"""The entries of masks that share one buffer."""
Spans = Sequence[tuple[int, int]]
"""The ranks that a budget keeps of a tensor, as half-open intervals."""


def masks_of_ranks(theta: Params, budgets: Sequence[Budget], ranks: Mapping[str, Tensor]) -> list[Mask]:
    """Return the masks that keep the entries whose ranks budgets select; those of other tensors are kept.

    Args:
        theta: Parameters, for their shapes and their device.
        budgets: The budgets.
        ranks: The rank of each entry of the tensors that are pruned.
    """
    every = [_pruned_spans(budget, ranks) for budget in budgets]
    pruned = [spans for spans in every if spans]
    together = max(1, MOST // max(1, sum(tensor.numel() for tensor in theta.values())))
    parts = [pruned[start : start + together] for start in range(0, len(pruned), together)]
    masks = iter([mask for part in parts for mask in _masks(theta, part, ranks)])
    return [next(masks) if spans else FULL for spans in every]


def _pruned_spans(budget: Budget, ranks: Mapping[str, Tensor]) -> dict[str, Spans]:
    """Return the ranks that a budget keeps, of the tensors of which it does not keep all."""
    spans = {name: (budget.spans(items.numel(), name), items.numel()) for name, items in ranks.items()}
    return {name: kept for name, (kept, size) in spans.items() if kept != [(0, size)]}


def _masks(theta: Params, every: Sequence[Mapping[str, Spans]], ranks: Mapping[str, Tensor]) -> list[Mask]:
    """Return masks that are views of one buffer, so that each is also at hand as one flat tensor."""
    sizes = [tensor.numel() for tensor in theta.values()]
    flat = torch.ones((len(every), sum(sizes)), dtype=torch.bool, device=device_of(theta))
    views: dict[str, tuple[Tensor, ...]] = {}
    for (name, tensor), part in zip(theta.items(), flat.split(sizes, 1), strict=True):
        if any(name in spans for spans in every):
            items = ranks[name].reshape(-1)
            part.copy_(_inside(items, [spans.get(name, [(0, items.numel())]) for spans in every]))
            views[name] = part.view(len(every), *tensor.shape).unbind()
    return [
        FixedMask({name: views[name][i] for name in spans}, None, row, tuple(theta))
        for i, (spans, row) in enumerate(zip(every, flat.unbind(), strict=True))
    ]


def _inside(items: Tensor, every: Sequence[Spans]) -> Tensor:
    """Return a row for each list of spans, which marks the items whose ranks are inside one of them."""
    most = max(1, *(len(spans) for spans in every))
    bounds = [[*spans, *[(0, 0)] * (most - len(spans))] for spans in every]
    on_device = to_device(torch.tensor(bounds, dtype=items.dtype), items.device)
    rows: list[Tensor] = []
    for place in range(most):
        kept = items < on_device[:, place, 1:]
        if any(row[place][0] for row in bounds):
            kept.logical_and_(items >= on_device[:, place, :1])
        rows.append(kept)
    return reduce(Tensor.logical_or_, rows)
