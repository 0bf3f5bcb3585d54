"""The feedback of a round as running sums, so that memory does not grow with the cohort."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, Params
from fedcover.policies.base import RoundFeedback


class FeedbackSum:
    """The coverage by the masks of updates, and the mean of their gradient reports.

    >>> theta = {"w": torch.zeros(2)}
    >>> total = FeedbackSum(theta, [{}, {}])
    >>> for values in ([1.0, 2.0], [3.0, 2.0]):
    ...     total.add(ClientUpdate(0, theta, {}, report={"w": torch.tensor(values)}))
    >>> feedback = total.feedback()
    >>> feedback.counts["w"].tolist(), feedback.report["w"].tolist()
    ([2, 2], [2.0, 2.0])
    """

    def __init__(self, theta: Params, planned: Sequence[Mask]) -> None:
        self._theta = theta
        self._planned = {id(mask) for mask in planned}
        self._masks: list[Mask] = []
        self._others: Mapping[str, Tensor] = {}
        self._reports: Params = {}
        self._reported = 0
        self.clients = 0

    def add(self, update: ClientUpdate) -> None:
        """Add the update of one client."""
        self.clients += 1
        if id(update.mask) in self._planned:
            self._masks.append(update.mask)  # it is in memory in any case
        else:
            own = coverage_of([update.mask], self._theta)
            self._others = {name: self._others[name] + own[name] if self._others else own[name] for name in own}
        if update.report is not None:
            if not self._reports:
                self._reports = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in self._theta.items()}
            for name, total in self._reports.items():
                total.add_(update.report[name].to(total.device))
            self._reported += 1

    def feedback(self) -> RoundFeedback:
        """Return the feedback of the updates so far."""
        counts = coverage_of(self._masks, self._theta)
        if self._others:
            counts = {name: count + self._others[name] for name, count in counts.items()}
        report = {name: total / self._reported for name, total in self._reports.items()} if self._reports else None
        return RoundFeedback(self.clients, counts, report)
