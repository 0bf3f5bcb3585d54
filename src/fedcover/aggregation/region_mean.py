"""The mean of client updates region by region, as a stream.

An entry's new value is the weighted mean over the clients that hold it,

    theta'_i = sum_n w_n m_{n,i} theta_{n,i} / sum_n w_n m_{n,i}.

An entry without a holder keeps its old value, bit for bit. Two running sums are kept for each entry, so memory does not
grow with the cohort.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedcover.aggregation.base import Aggregation, ClientUpdate
from fedcover.aggregation.stacks import Positions, StackRow
from fedcover.params import (
    Mask,
    Params,
    device_of,
    entries_of,
    flat_mask,
    flat_values,
    most_entries,
    most_together,
    spans_of,
)

ONE_BY_ONE: tuple[str, ...] = ("cpu",)
"""Devices on which clients with different masks are added one after another: launches cost little there."""


class RegionSum(Aggregation):
    """A running mean of updates over each region.

    Sums are in double precision, so the order of clients affects the result only by rounding.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        by_examples: Whether holders are weighted by their number of examples; otherwise all have the same weight. An
            update's own ``weights`` take precedence.
        zero_padded: Whether to divide by all clients and not by the holders, as if a pruned value were a trained 0.

    >>> total = RegionSum({"w": torch.tensor([5.0, 7.0])})
    >>> total.add(ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])}))
    >>> total.result()["w"].tolist()
    [1.0, 7.0]
    """

    def __init__(self, theta: Params, by_examples: bool = False, zero_padded: bool = False) -> None:
        self._theta, self._by_examples, self._zero_padded = theta, by_examples, zero_padded
        self._clients = 0.0
        self._sizes = [tensor.numel() for tensor in theta.values()]
        self._spans = [entries_of(span) for span in spans_of(theta)]
        self._common = dict.fromkeys(theta, 0.0)  # weights of all entries of a tensor, which result adds
        self._flat: tuple[Tensor, Tensor] | None = None
        self._sum: dict[str, Tensor]
        self._weight: dict[str, Tensor]
        if len(self._spans) == 1:
            sums, weights = torch.zeros((2, sum(self._sizes)), dtype=torch.float64, device=device_of(theta))
            self._use(sums, weights)
        else:
            self._sum, self._weight = (
                {k: torch.zeros_like(t, dtype=torch.float64) for k, t in theta.items()} for _ in range(2)
            )

    def _flat_sums(self) -> tuple[Tensor, Tensor]:
        """Return the sums and the weights of all entries as one tensor each, of which those by name are parts.

        Rows of stacks are added to them in a few operations. Without such rows large models on a CPU have none: it sums
        single tensors faster than the operating system provides the memory of large ones.
        """
        return self._flat or self._use(flat_values(self._sum, torch.float64), flat_values(self._weight, torch.float64))

    def _use(self, sums: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        self._flat, self._sum, self._weight = (sums, weights), self._parts(sums), self._parts(weights)
        return self._flat

    def _parts(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the part of each parameter of a flat tensor, in its shape."""
        parts = zip(self._theta.items(), flat.split(self._sizes), strict=True)
        return {name: part.view(tensor.shape) for (name, tensor), part in parts}

    def add(self, update: ClientUpdate) -> None:
        """Add one client; values outside its mask have no influence, not even if they are NaN."""
        if update.weights is not None:
            return self._add_weighted(update, update.weights)
        if self._is_stacked(update):
            return self._add_stacked([update])
        weight = self._share(update)
        self._clients += weight
        for name, total in self._sum.items():
            values = update.theta[name].to(total.device)
            if name in update.mask:
                kept = update.mask[name].to(total.device)
                total.add_(torch.where(kept, values, 0.0), alpha=weight)
                self._weight[name].add_(kept, alpha=weight)
            else:
                total.add_(values, alpha=weight)
                self._common[name] += weight

    def add_together(self, updates: Sequence[ClientUpdate]) -> None:
        """Add several clients at once, in fewer and larger operations, which suits a GPU."""
        self._add_stacked([update for update in updates if self._is_stacked(update)])
        for update in updates:
            if not self._is_stacked(update):
                self.add(update)

    def _share(self, update: ClientUpdate) -> float:
        return (float(update.examples) if self._by_examples else 1.0) * update.discount

    def _is_stacked(self, update: ClientUpdate) -> bool:
        """Return whether an update is a row of a stack that is best added in a few large operations.

        Rows of whole models that are too large to be processed at once are not: their tensors are views, and are added
        one by one.
        """
        theta = update.theta
        if update.weights is not None or not isinstance(theta, StackRow) or theta.is_changed():
            return False
        stack = theta.stack
        if stack.names != tuple(self._theta) or stack.values.device != device_of(self._theta):
            return False
        return len(self._spans) == 1 or stack.positions[theta.row] is not None

    def _add_stacked(self, updates: Sequence[ClientUpdate]) -> None:
        """Add rows of stacks. Clients with the same sub-model are summed in its shapes and then added to its region."""
        if self._are_one_block(updates):
            return self._add_block(updates)
        alike: dict[Any, list[tuple[StackRow, ClientUpdate]]] = {}
        for update in updates:
            row, share = update.theta, self._share(update)
            assert isinstance(row, StackRow)
            self._clients += share
            key = id(row.stack), id(row.stack.positions[row.row]), id(update.mask), share
            alike.setdefault(key, []).append((row, update))
        for (*_, share), members in alike.items():
            row, update = members[0]
            values = _sum_of_rows(row.stack.values, [one.row for one, _ in members])
            self._add_region(values, row.stack.positions[row.row], update.mask, share)
            _, weights = self._flat_sums()
            if update.mask:
                kept = flat_mask(update.mask, self._theta).split(self._spans)
                for part, weight in zip(kept, weights.split(self._spans), strict=True):
                    weight.add_(part, alpha=share * len(members))
            else:
                weights.add_(share * len(members))

    def _are_one_block(self, updates: Sequence[ClientUpdate]) -> bool:
        """Return whether updates are several whole models of one stack with equal weights, and few enough for a GPU."""
        rows = [update.theta for update in updates if isinstance(update.theta, StackRow)]
        device = device_of(self._theta)
        return (
            len(updates) > 1
            and device.type not in ONE_BY_ONE
            and len(rows) <= most_together(sum(self._sizes), device)
            and len({id(row.stack) for row in rows}) == 1
            and all(row.stack.positions[row.row] is None for row in rows)
            and len({self._share(update) for update in updates}) == 1
        )

    def _add_block(self, updates: Sequence[ClientUpdate]) -> None:
        """Add whole models of one stack, whatever their masks, in a few operations."""
        share, (sums, weights) = self._share(updates[0]), self._flat_sums()
        self._clients += share * len(updates)
        rows = [update.theta for update in updates if isinstance(update.theta, StackRow)]
        values = _rows(rows[0].stack.values, [row.row for row in rows])
        if not any(update.mask for update in updates):
            sums.add_(values.sum(0, dtype=torch.float64), alpha=share)
            weights.add_(share * len(updates))
            return
        whole = torch.ones((), dtype=torch.bool, device=sums.device).expand(len(sums))
        kept = torch.stack([flat_mask(update.mask, self._theta) if update.mask else whole for update in updates])
        sums.add_(torch.where(kept, values, 0.0).sum(0, dtype=torch.float64), alpha=share)
        weights.add_(kept.sum(0), alpha=share)

    def _add_region(self, values: Tensor, positions: Positions | None, mask: Mask, share: float) -> None:
        """Add values to the entries of a sub-model, as far as the mask keeps them."""
        sums, _ = self._flat_sums()
        if positions is None:
            kept = torch.where(flat_mask(mask, self._theta), values, 0.0) if mask else values
            sums.add_(kept, alpha=share)
            return
        if mask and not positions.are_of(mask):
            values = torch.where(flat_mask(mask, self._theta)[positions.index], values, 0.0)
        sums.index_add_(0, positions.index, values, alpha=share)

    def _add_weighted(self, update: ClientUpdate, weights: Mapping[str, Tensor]) -> None:
        for name, total in self._sum.items():
            values, weight = update.theta[name].to(total), weights[name].to(total) * update.discount
            if name in update.mask:
                kept = update.mask[name].to(total.device)
                values, weight = torch.where(kept, values, 0.0), torch.where(kept, weight, 0.0)
            total.addcmul_(values, weight)
            self._weight[name].add_(weight)

    def result(self) -> Params:
        """Return the new theta."""
        for name in [name for name, weight in self._common.items() if weight]:
            self._weight[name].add_(self._common[name])
            self._common[name] = 0.0
        dtypes = {tensor.dtype for tensor in self._theta.values()}
        if self._flat is None or len(dtypes) != 1 or len(self._spans) > 1:
            return {
                name: _new(self._mean(total, self._weight[name]), self._weight[name], self._theta[name])
                for name, total in self._sum.items()
            }
        new = _new(self._mean(*self._flat), self._flat[1], flat_values(self._theta, *dtypes))
        parts = torch.ops.aten.split_with_sizes_copy(new, self._sizes)  # each with its own memory
        return {name: part.view(old.shape) for (name, old), part in zip(self._theta.items(), parts, strict=True)}

    def _mean(self, total: Tensor, weight: Tensor) -> Tensor:
        return total / (self._clients if self._zero_padded else weight.clamp_min(1e-300))


def _sum_of_rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the sum of some rows in double precision."""
    if values.device.type != "cpu" or values.numel() <= most_entries(values.device):
        return _rows(values, sorted(rows) if len(rows) == len(values) else rows).sum(0, dtype=torch.float64)
    total = values[rows[0]].to(torch.float64, copy=True)
    step = most_entries(values.device)  # a CPU would convert all rows first
    for start in range(0, len(total), step):
        part = total[start : start + step]
        for row in rows[1:]:
            part.add_(values[row, start : start + step])
    return total


def _rows(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows; without a copy if they are consecutive."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return values[rows[0] : rows[0] + len(rows)]
    return torch.stack([values[row] for row in rows])  # a list as an index would be copied to the device first


def _new(mean: Tensor, weight: Tensor, old: Tensor) -> Tensor:
    """Return the mean where an entry has a holder, and its old value elsewhere."""
    return torch.where(weight > 0, mean.to(old.dtype), old)


def step_towards(theta: Params, mean: Params, step: float) -> Params:
    """Return theta + step (mean - theta).

    Entries that the mean left unchanged stay bit-identical, and a step of 1 returns the mean itself.

    >>> step_towards({"w": torch.tensor([0.0, 5.0])}, {"w": torch.tensor([2.0, 5.0])}, 0.5)["w"].tolist()
    [1.0, 5.0]
    """
    if step == 1.0:
        return mean
    return {k: torch.where(mean[k] == old, old, old + step * (mean[k] - old)) for k, old in theta.items()}


def average(theta: Params, updates: Iterable[ClientUpdate], by_examples: bool = False) -> Params:
    """Return the mean of updates over each region, bit-identical for any order of the updates.

    Args:
        theta: The global model before the round; entries without a holder keep its values.
        updates: The clients' updates.
        by_examples: Whether to weight clients by their number of examples, and not equally.

    >>> update = ClientUpdate(0, {"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([True, False])})
    >>> average({"w": torch.tensor([5.0, 7.0])}, [update])["w"].tolist()
    [1.0, 7.0]
    """
    total = RegionSum(theta, by_examples)
    for update in sorted(updates, key=lambda u: u.client):
        total.add(update)
    return total.result()
