"""A batched solver for the problem of ``nearest_weights``: very many sets of clients at the same time.

Clients with the same label distribution form one kind. If the kinds with positive weight are known, the weights follow
from a linear system with one unknown for each label. Its matrix is a sum over these kinds, so it is one matrix product
for all sets together. The kinds with positive weight are determined by block principal pivoting: all kinds on the wrong
side change at once or, where that has not helped for a while, only the last of them.
"""

import torch
from torch import Tensor

from fedcover.aggregation.label_weights.solver import RIDGE, checked, nearest_weights

MOST_STEPS = 100
"""Number of steps after which a set is solved by ``nearest_weights``; nearly all need fewer than ten."""
TRIES = 3
"""Number of steps without improvement after which kinds change one at a time."""
MOST_NUMBERS = 1 << 21
"""Limit on the numbers in one work table: 16 MiB."""


class SetSolver:
    """A solver for the weights of many sets of clients at once.

    Args:
        mixes: The label distribution of each client, one row per client.
        target: The label distribution of the population.
        ridge: See ``nearest_weights``.

    >>> solver = SetSolver(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.25, 0.75]))
    >>> solver.weights(torch.tensor([[True, True], [True, False]])).round(decimals=6).tolist()
    [[0.25, 0.75], [1.0, 0.0]]
    """

    def __init__(self, mixes: Tensor, target: Tensor, ridge: float = RIDGE) -> None:
        self.mixes, self.target = checked(mixes, target)
        self._ridge = max(ridge, RIDGE)
        kinds, self._kind = torch.unique(self.mixes, dim=0, return_inverse=True)
        # Only the differences from the target matter; they span no more dimensions than there are kinds.
        self._points = torch.linalg.qr((kinds - self.target).T).R.T.contiguous()
        count, axes = self._points.shape
        squares = (self._points[:, :, None] * self._points[:, None, :]).view(count, -1)
        self._sums = torch.cat([torch.ones(count, 1, dtype=torch.float64), self._points, squares], 1)
        self.rows = max(1, MOST_NUMBERS // (len(self.mixes) + axes * axes))
        """The number of sets that fit into the work memory."""

    def weights(self, members: Tensor) -> Tensor:
        """Return for each set (a row) the weight of each client (a column), 0 outside the set; no set may be empty."""
        sizes = torch.zeros(len(members), len(self._points), dtype=torch.float64)
        sizes.index_add_(1, self._kind, members.double())
        used, unsolved = self._used(sizes)
        shares = self._shares(torch.where(used, sizes, 0.0), refined=True)[0]
        weights = torch.where(used, shares, 0.0).clamp_min_(0)[:, self._kind].mul_(members)
        weights /= weights.sum(1, keepdim=True)
        for number in unsolved.tolist():
            inside = members[number]
            weights[number] = 0.0
            weights[number, inside] = nearest_weights(self.mixes[inside], self.target, ridge=self._ridge)[0]
        return weights

    def _used(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return which kinds have weight in each set, and the numbers of the sets for which pivoting did not end."""
        final, left = sizes > 0, torch.arange(len(sizes))
        used, fewest, tries = final, torch.full_like(left, sizes.shape[1] + 1), torch.full_like(left, TRIES)
        last = torch.arange(1, sizes.shape[1] + 1, dtype=torch.int32)
        for _ in range(MOST_STEPS):
            remaining = sizes[left]
            shares, sound = self._shares(torch.where(used, remaining, 0.0))
            wrong = ((shares > 0) & (remaining > 0)) != used
            count = wrong.sum(1)
            better = count < fewest
            fewest, tries = torch.where(better, count, fewest), torch.where(better, TRIES, tries - 1)
            order = wrong * last
            used = used ^ torch.where(tries[:, None] < 0, wrong & (order == order.amax(1, keepdim=True)), wrong)
            unfinished = (count > 0) | ~sound
            final[left[~unfinished]] = used[~unfinished]
            left, used, fewest, tries = left[unfinished], used[unfinished], fewest[unfinished], tries[unfinished]
            if not len(left):
                break
        return final, left

    def _shares(self, sizes: Tensor, refined: bool = False) -> tuple[Tensor, Tensor]:
        """Return the weights of clients by kind if only kinds with ``sizes`` > 0 have any, and whether they are sound.

        These weights sum to 1 and solve the problem without w >= 0. A negative weight means that its kind should have
        none; a positive weight of a kind that is not counted means that it should have some.
        """
        points, ridge = self._points, self._ridge
        sums = sizes @ self._sums
        axes = points.shape[1]
        count, mean = sums[:, :1], sums[:, 1 : axes + 1] / sums[:, :1]
        matrix = sums[:, axes + 1 :].view(-1, axes, axes) - (count * mean)[:, :, None] * mean[:, None, :]
        matrix.diagonal(dim1=1, dim2=2).add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(matrix)

        def along(right: Tensor) -> Tensor:
            """Project each kind's offset from the mean onto the solution of the system with this right side."""
            direction: Tensor = torch.cholesky_solve(right[:, :, None], factor)[:, :, 0]
            offset: Tensor = direction @ points.T - (direction * mean).sum(1, keepdim=True)
            return offset

        shares = 1 / count - along(mean)
        if refined:  # with a tiny ridge the first solution is accurate to 1e-6: solve again for the residual
            slopes = (sizes * shares) @ points @ points.T + ridge * shares
            slopes -= (sizes * slopes).sum(1, keepdim=True) / count
            shares -= (slopes - along((sizes * slopes) @ points)) / ridge
        return shares, failed == 0
