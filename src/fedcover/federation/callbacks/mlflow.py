"""Log a run to MLflow."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedcover.errors import InputError, check_extra
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView
from fedcover.federation.callbacks.metrics import measured_numbers
from fedcover.federation.callbacks.tracker_files import run_key
from fedcover.federation.history import RoundRecord
from fedcover.toml import flatten

KEY = "fedcover.run"
"""The tag by which a resumed run finds itself."""
DATABASE = "mlflow.db"
LONGEST = 500
"""The longest value of a parameter that every MLflow store takes."""


@CALLBACKS.register("mlflow")
@dataclass
class MLflow(Callback):
    """Log the settings and the numbers of every round to MLflow.

    A resumed run continues the same MLflow run. A point that is already there is not logged again, and those that are
    missing are logged from the history.

    Args:
        uri: Tracking URI, such as ``sqlite:////home/me/mlflow.db`` or the address of a server; by default the file
            ``mlflow.db`` in the run folder. Without an address of a server, nothing uses the network.
        experiment: Name of the MLflow experiment.
    """

    uri: str = ""
    experiment: str = "fedcover"

    def __post_init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._logged: set[tuple[str, int]] = set()

    def on_start(self, run: RunView) -> None:
        """Create the MLflow run, or find it after a resume, and log the rounds that it does not have."""
        check_extra("mlflow", "the callback MLflow", "mlflow", "sqlalchemy", "alembic")
        if not self.uri and run.folder is None:
            raise InputError("MLflow needs a place; pass out to the run, or uri to MLflow")
        if not self.uri and run.folder is not None:
            _create_database(run.folder)
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri or f"sqlite:///{(run.folder or Path()) / DATABASE}")
        stored = self._client.get_experiment_by_name(self.experiment)
        experiment = stored.experiment_id if stored else self._client.create_experiment(self.experiment)
        key = run_key(run, "MLflow")
        same = self._client.search_runs([experiment], filter_string=f"tags.`{KEY}` = '{key}'")
        mlflow_run = (
            same[0] if same else self._client.create_run(experiment, tags={KEY: key}, run_name=run.name or None)
        )
        self._run = mlflow_run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        self._logged = {
            (name, point.step)
            for name in mlflow_run.data.metrics
            for point in self._client.get_metric_history(self._run, name)
        }
        self._log_settings(run, mlflow_run.data.params)
        for record in run.history:
            self._log(record)

    def on_round(self, view: RoundView) -> None:
        """Log a round."""
        self._log(view.record)

    def on_end(self, run: RunView) -> None:
        """Mark the MLflow run as finished, with the reason if a callback stopped it."""
        if stop := run.history.summary.get("stopped"):
            self._client.set_tag(self._run, "fedcover.stopped", stop["reason"])
        self._client.set_terminated(self._run)

    def close(self) -> None:
        """Forget the client."""
        self._client = None

    def _log_settings(self, run: RunView, logged: dict[str, str]) -> None:
        from mlflow.entities import Param

        settings = {key: str(value)[:LONGEST] for key, value in flatten(run.settings)}
        changes = {"rounds", "name", "engine", "workers"}  # a parameter of MLflow cannot change
        params = [Param(key, value) for key, value in settings.items() if key not in logged and key not in changes]
        for start in range(0, len(params), 100):
            self._client.log_batch(self._run, params=params[start : start + 100])

    def _log(self, record: RoundRecord) -> None:
        from mlflow.entities import Metric

        numbers = measured_numbers(record)
        points = [
            Metric(name, float(value), int(time.time() * 1000), record.round)
            for name, value in numbers.items()
            if (name, record.round) not in self._logged
        ]
        if points:
            self._client.log_batch(self._run, metrics=points)
        self._logged |= {(name, record.round) for name in numbers}


def _create_database(folder: Path) -> None:
    """Create the database of a run folder in one step, so that a kill never leaves part of it."""
    from mlflow.tracking import MlflowClient

    if (folder / DATABASE).exists():
        return
    draft = folder / f".{DATABASE}.{os.getpid()}.part"
    draft.unlink(missing_ok=True)
    MlflowClient(tracking_uri=f"sqlite:///{draft}").search_experiments()  # the first call creates the tables
    os.replace(draft, folder / DATABASE)
