"""Log a run to Weights & Biases."""

import shutil
from dataclasses import dataclass
from typing import Any, Literal

from fedcover.errors import InputError, check_extra
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView
from fedcover.federation.callbacks.metrics import measured_numbers
from fedcover.federation.callbacks.tracker_files import run_key
from fedcover.federation.history import RoundRecord
from fedcover.toml import flatten


@CALLBACKS.register("wandb")
@dataclass
class WandB(Callback):
    """Log the settings and the numbers of every round to Weights & Biases, offline by default.

    ``wandb sync RUN/wandb/offline-run-*`` uploads an offline run. A resumed offline run is written again as a whole,
    from the history; a resumed online run continues after the last round that the server has.

    Args:
        project: Name of the project.
        mode: ``offline``, or ``online`` to upload while the run is played, which uses the network.
    """

    project: str = "fedcover"
    mode: Literal["offline", "online"] = "offline"

    def __post_init__(self) -> None:
        if self.mode not in ("offline", "online"):
            raise InputError(f"mode must be 'offline' or 'online'; got {self.mode!r}")
        self._run: Any = None

    def on_start(self, run: RunView) -> None:
        """Start the run of Weights & Biases, and log the rounds before a resume that it does not have."""
        check_extra("wandb", "the callback WandB", "wandb")
        if run.folder is None:
            raise InputError("WandB needs a run folder; pass out")
        import wandb

        key = run_key(run, "WandB")
        for earlier in (run.folder / "wandb").glob(f"offline-run-*-{key}") if self.mode == "offline" else ():
            shutil.rmtree(earlier)
        self._run = wandb.init(
            project=self.project,
            name=run.name or None,
            id=key,
            dir=str(run.folder),
            mode=self.mode,
            config=dict(flatten(run.settings)),
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )
        for record in run.history:
            self._log(record)

    def on_round(self, view: RoundView) -> None:
        """Log a round."""
        self._log(view.record)

    def on_end(self, run: RunView) -> None:
        """Note why a callback stopped the run."""
        if stop := run.history.summary.get("stopped"):
            self._run.summary["stopped"] = stop["reason"]

    def close(self) -> None:
        """Finish the run of Weights & Biases."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, record: RoundRecord) -> None:
        if record.round >= self._run.step:  # a resumed online run starts at the step after its last
            self._run.log(measured_numbers(record), step=record.round, commit=True)
