"""Keep the best model of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView
from fedcover.federation.callbacks.metrics import better, check_metric, metric_of

BEST = "best.safetensors"
"""The file of the best model in a run folder."""


@CALLBACKS.register("keep_best")
@dataclass
class KeepBest(Callback):
    """Write the model with the best metric so far to ``best.safetensors`` in the run folder.

    ``fedcover.load_model(folder, model, best=True)`` reads it. The file's header has the ``metric``, its ``value`` and
    the ``round``. It is replaced in one step, so it is whole at any time.

    Args:
        metric: A number of the records, such as accuracy, loss or a metric of the task.
        mode: ``min`` or ``max``, what is better; it may be left out for metrics that fedcover knows.
    """

    metric: str = "accuracy"
    mode: str = ""

    def __post_init__(self) -> None:
        self.mode = better(self.metric, self.mode)
        self._best: float | None = None
        self._round = 0

    def on_start(self, run: RunView) -> None:
        """Forget earlier runs; raise InputError without a run folder."""
        if run.folder is None:
            raise InputError("KeepBest needs a run folder; pass out")
        check_metric(run, self.metric)
        self._best, self._round = None, 0

    def on_round(self, view: RoundView) -> None:
        """Write the model if it is better than all before."""
        from safetensors.torch import save

        value = metric_of(view.record, self.metric)
        sign = 1 if self.mode == "max" else -1
        if value is None or not (self._best is None or sign * (value - self._best) > 0):
            return
        assert view.folder is not None
        self._best, self._round = value, view.record.round
        header = {"round": str(self._round), "metric": self.metric, "value": repr(value)}
        theta = {name: tensor.contiguous().clone() for name, tensor in view.theta.items()}
        write_atomically(view.folder / BEST, save(theta, metadata=header))

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its round."""
        return {"best": self._best, "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them."""
        self._best, self._round = state["best"], state["round"]
