"""The feedback of a round as running sums, so that memory does not grow with the cohort."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from fedcover.aggregation.base import ClientUpdate
from fedcover.federation.planned_round import PlannedRound
from fedcover.masks.coverage import coverage_of
from fedcover.params import Mask, Params
from fedcover.policies.base import RoundFeedback


class FeedbackSum:
    """The coverage by the masks of a round's updates, and the mean of their gradient reports."""

    def __init__(self, planned: PlannedRound) -> None:
        self._planned, self._theta = planned, planned.state.theta
        self._planned_ids = Counter(id(mask) for mask in planned.masks)
        self._masks: list[Mask] = []
        self._others: Mapping[str, Tensor] = {}
        self._reports: Params = {}
        self._reported = 0
        self.clients = 0

    def add(self, update: ClientUpdate) -> None:
        """Add the update of one client."""
        self.clients += 1
        if id(update.mask) in self._planned_ids:
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
        report = {name: total / self._reported for name, total in self._reports.items()} if self._reports else None
        return RoundFeedback(self.clients, self._counts(), report)

    def _counts(self) -> Mapping[str, Tensor]:
        if not self._others and Counter(id(mask) for mask in self._masks) == self._planned_ids:
            return self._planned.coverage  # every client holds what was planned
        counts = coverage_of(self._masks, self._theta)
        return {name: count + self._others[name] for name, count in counts.items()} if self._others else counts
