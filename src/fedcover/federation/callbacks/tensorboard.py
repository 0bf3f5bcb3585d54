"""Log a run for TensorBoard."""

from dataclasses import dataclass
from typing import Any

from fedcover.errors import InputError, check_extra
from fedcover.federation.callbacks.base import CALLBACKS, Callback, RoundView, RunView
from fedcover.federation.callbacks.metrics import measured_numbers
from fedcover.federation.callbacks.tracker_files import tracker_folder
from fedcover.federation.history import RoundRecord
from fedcover.toml import to_toml

SUFFIX = ".fedcover"
"""The end of the names of the event files that are written here."""


@CALLBACKS.register("tensorboard")
@dataclass
class TensorBoard(Callback):
    """Write the numbers of every round as event files for TensorBoard.

    A resumed run writes the events of its earlier rounds again, from the history, so that no point is doubled or
    missing.

    Args:
        folder: A folder of logs, in which the run gets a folder of its own name; ``tensorboard`` in the run folder by
            default.
    """

    folder: str = ""

    def __post_init__(self) -> None:
        self._writer: Any = None

    def on_start(self, run: RunView) -> None:
        """Write the rounds before a resume; raise InputError if there are events of another run."""
        check_extra("tensorboard", "the callback TensorBoard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder = tracker_folder(run, self.folder, "TensorBoard")
        earlier = list(folder.glob(f"events.*{SUFFIX}")) if folder.is_dir() else []
        if earlier and not run.resumed:
            raise InputError(f"{folder} already has the events of a run; name another folder, or resume that run")
        for path in earlier:
            path.unlink()
        self._writer = SummaryWriter(str(folder), filename_suffix=SUFFIX)
        if run.settings:
            self._writer.add_text("settings", f"```toml\n{to_toml(run.settings)}```", 0)
        for record in run.history:
            self._log(record)
        self._writer.flush()

    def on_round(self, view: RoundView) -> None:
        """Write a round, at once."""
        self._log(view.record)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log(self, record: RoundRecord) -> None:
        for name, value in measured_numbers(record).items():
            self._writer.add_scalar(name, value, record.round)
