"""Keep the best model of a run."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedcover._files import write_atomically
from fedcover.errors import CheckpointWarning, InputError
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView
from fedcover.federation.callbacks.metrics import better, check_metric, metric_of

BEST = "best.safetensors"
"""The file of the best model in a run folder."""
BEFORE = ".best-before.safetensors"
"""The file of the best model before the last round, if the last round has the best one."""


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

    state_of: ClassVar = ("metric", "mode")
    metric: str = "accuracy"
    mode: str = ""

    def __post_init__(self) -> None:
        self.mode = better(self.metric, self.mode)
        self._best: float | None = None
        self._round = self._rounds = 0
        self._folder = Path()

    def on_start(self, run: RunView) -> None:
        """Forget earlier runs; raise InputError without a run folder."""
        if run.folder is None:
            raise InputError("KeepBest needs a run folder; pass out")
        check_metric(run, self.metric)
        self._best, self._round, self._rounds, self._folder = None, 0, run.rounds, run.folder

    def on_round(self, view: RoundView) -> None:
        """Write the model if it is better than all before."""
        from safetensors.torch import save

        value = metric_of(view.record, self.metric)
        sign = 1 if self.mode == "max" else -1
        if value is None or not (self._best is None or sign * (value - self._best) > 0):
            return
        best = self._folder / BEST
        if view.record.round == self._rounds and _content(best) == (self.metric, self._round):
            # A longer run may not evaluate this round, and then has the best model before it.
            write_atomically(self._folder / BEFORE, best.read_bytes())
        self._best, self._round = value, view.record.round
        header = {"round": str(self._round), "metric": self.metric, "value": repr(value)}
        theta = {name: tensor.contiguous().clone() for name, tensor in view.theta.items()}
        write_atomically(best, save(theta, metadata=header))

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and its round."""
        return {"best": self._best, "round": self._round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them, and the model of that round if a later one has replaced it."""
        self._best, self._round = state["best"], state["round"]
        best, before = self._folder / BEST, self._folder / BEFORE
        if _content(best) != (self.metric, self._round):
            if _content(before) == (self.metric, self._round):
                write_atomically(best, before.read_bytes())
            elif self._best is None:
                best.unlink(missing_ok=True)
            elif _content(best) is None:
                warnings.warn(
                    f"{best} with the best model, of round {self._round}, is missing or damaged; it is written again"
                    f" after a better round",
                    CheckpointWarning,
                    stacklevel=6,
                )


def _content(path: Path) -> tuple[str, int] | None:
    """Return the metric and the round of the model in a file; None if there is no such file, or it is damaged."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
        return header["metric"], int(header["round"])
    except (SafetensorError, KeyError, ValueError):
        return None
