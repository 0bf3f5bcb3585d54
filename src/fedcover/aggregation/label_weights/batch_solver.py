"""The problem of ``nearest_weights`` for very many sets of clients, all solved at the same time.

Clients with the same mix are one kind. If the kinds that have weight are known, the weights follow from a system with
one unknown for each label, whose matrix is a sum over these kinds: for all sets together it is one matrix product.
Which kinds have weight is found by block principal pivoting: all kinds that are on the wrong side change at once, and
where that has not helped for a while only the last of them.
"""

import torch
from torch import Tensor

from fedcover.aggregation.label_weights.solver import RIDGE, checked, nearest_weights

MOST_STEPS = 100
"""Steps after which a set is left to ``nearest_weights``; nearly all need fewer than ten."""
TRIES = 3
"""Steps without fewer kinds on the wrong side after which they change one at a time."""
MOST_NUMBERS = 1 << 21
"""How many numbers a table of the work may have: 16 MiB."""


class SetSolver:
    """Weights of sets of clients, as many sets at once as are given.

    >>> solver = SetSolver(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0.25, 0.75]))
    >>> solver.weights(torch.tensor([[True, True], [True, False]])).round(decimals=6).tolist()
    [[0.25, 0.75], [1.0, 0.0]]
    """

    def __init__(self, mixes: Tensor, target: Tensor, ridge: float = RIDGE) -> None:
        self.mixes, self.target = checked(mixes, target)
        self._ridge = max(ridge, RIDGE)
        kinds, self._kind = torch.unique(self.mixes, dim=0, return_inverse=True)
        # What counts is where the mixes lie around the target: that takes no more axes than there are kinds.
        self._points = torch.linalg.qr((kinds - self.target).T).R.T.contiguous()
        count, axes = self._points.shape
        squares = (self._points[:, :, None] * self._points[:, None, :]).view(count, -1)
        self._sums = torch.cat([torch.ones(count, 1, dtype=torch.float64), self._points, squares], 1)
        self.rows = max(1, MOST_NUMBERS // (len(self.mixes) + axes * axes))
        """How many sets fit into the memory that the work may take."""

    def weights(self, members: Tensor) -> Tensor:
        """For each set (a row) the weight of each client (a column), 0 outside the set; no set may be empty."""
        sizes = torch.zeros(len(members), len(self._points), dtype=torch.float64)
        sizes.index_add_(1, self._kind, members.double())
        used, left = self._used(sizes)
        shares = self._shares(torch.where(used, sizes, 0.0), refined=True)[0]
        weights = torch.where(used, shares, 0.0).clamp_min_(0)[:, self._kind].mul_(members)
        weights /= weights.sum(1, keepdim=True)
        for number in left.tolist():
            held = members[number]
            weights[number] = 0.0
            weights[number, held] = nearest_weights(self.mixes[held], self.target, ridge=self._ridge)[0]
        return weights

    def _used(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Which kinds have weight in each set, and the numbers of sets for which this was not found."""
        found, left = sizes > 0, torch.arange(len(sizes))
        used, fewest, tries = found, torch.full_like(left, sizes.shape[1] + 1), torch.full_like(left, TRIES)
        last = torch.arange(1, sizes.shape[1] + 1, dtype=torch.int32)
        for _ in range(MOST_STEPS):
            own = sizes[left]
            shares, sound = self._shares(torch.where(used, own, 0.0))
            wrong = ((shares > 0) & (own > 0)) != used
            many = wrong.sum(1)
            better = many < fewest
            fewest, tries = torch.where(better, many, fewest), torch.where(better, TRIES, tries - 1)
            places = wrong * last
            used = used ^ torch.where(tries[:, None] < 0, wrong & (places == places.amax(1, keepdim=True)), wrong)
            going = (many > 0) | ~sound
            found[left[~going]] = used[~going]
            left, used, fewest, tries = left[going], used[going], fewest[going], tries[going]
            if not len(left):
                break
        return found, left

    def _shares(self, sizes: Tensor, refined: bool = False) -> tuple[Tensor, Tensor]:
        """The weight of a client of each kind if only those counted in ``sizes`` have any, and whether it is sound.

        These weights sum to 1 and solve the problem without w >= 0. A weight that is negative says that its kind
        should have none, and a positive one of a kind that is not counted that it should have some.
        """
        points, ridge = self._points, self._ridge
        sums = sizes @ self._sums
        axes = points.shape[1]
        count, mean = sums[:, :1], sums[:, 1 : axes + 1] / sums[:, :1]
        matrix = sums[:, axes + 1 :].view(-1, axes, axes) - (count * mean)[:, :, None] * mean[:, None, :]
        matrix.diagonal(dim1=1, dim2=2).add_(ridge)
        factor, failed = torch.linalg.cholesky_ex(matrix)

        def along(right: Tensor) -> Tensor:
            """Where each kind lies beside the mean, along the solution of the system with this right side."""
            way: Tensor = torch.cholesky_solve(right[:, :, None], factor)[:, :, 0]
            beside: Tensor = way @ points.T - (way * mean).sum(1, keepdim=True)
            return beside

        shares = 1 / count - along(mean)
        if refined:  # with a tiny ridge the first solution is good to 1e-6: solve once more for what is left
            slopes = (sizes * shares) @ points @ points.T + ridge * shares
            slopes -= (sizes * slopes).sum(1, keepdim=True) / count
            shares -= (slopes - along((sizes * slopes) @ points)) / ridge
        return shares, failed == 0
