"""Stop a run whose metric no longer improves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedcover.errors import check_number, check_whole
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView, Stop
from fedcover.federation.callbacks.metrics import better, check_metric, metric_of


@CALLBACKS.register("early_stopping")
@dataclass
class EarlyStopping(Callback):
    """Stop once a metric has not improved for a number of evaluations.

    Args:
        metric: A number of the records, such as accuracy, loss or a metric of the task.
        patience: Evaluated rounds without an improvement after which the run ends.
        min_delta: The least change that counts as an improvement.
        mode: ``min`` or ``max``, what is better; it may be left out for metrics that fedcover knows.

    >>> EarlyStopping("loss", patience=3)
    EarlyStopping(metric='loss', patience=3, min_delta=0.0, mode='min')
    """

    state_of: ClassVar = ("metric", "mode")
    metric: str = "accuracy"
    patience: int = 10
    min_delta: float = 0.0
    mode: str = ""

    def __post_init__(self) -> None:
        check_whole("patience", self.patience, 1)
        check_number("min_delta", self.min_delta, -1e-300, float("inf"), "a number of 0 or more")
        self.mode = better(self.metric, self.mode)
        self._best: float | None = None
        self._best_round = self._waited = 0

    def on_start(self, run: RunView) -> None:
        """Forget earlier runs."""
        check_metric(run, self.metric)
        self._best, self._best_round, self._waited = None, 0, 0

    def on_round(self, view: RoundView) -> Stop | None:
        """Compare the round with the best one so far."""
        value = metric_of(view.record, self.metric)
        if value is None:
            return None
        sign = 1 if self.mode == "max" else -1
        if self._best is None or sign * (value - self._best) > self.min_delta:
            self._best, self._best_round, self._waited = value, view.record.round, 0
            return None
        self._waited += 1
        if self._waited < self.patience:
            return None
        return Stop(
            f"{self.metric} has not improved in {self._waited} evaluation{'s' if self._waited > 1 else ''} since round"
            f" {self._best_round} ({self._best:.6g})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its round and the evaluations since."""
        return {"best": self._best, "round": self._best_round, "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._best, self._best_round, self._waited = state["best"], state["round"], state["waited"]
