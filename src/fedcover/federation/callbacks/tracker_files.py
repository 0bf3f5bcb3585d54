"""Where trackers keep a run, and under which key, so that a resumed run continues the same one."""

import uuid
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.federation.callbacks.base import RunView


def tracker_folder(run: RunView, folder: str, tracker: str) -> Path:
    """Return the folder of a tracker: RUN/tracker by default, FOLDER/NAME OF THE RUN otherwise.

    Raises:
        InputError: If there is neither a folder nor a run folder.
    """
    if folder:
        return Path(folder) / (run.name or "run")
    if run.folder is None:
        raise InputError(f"{tracker} needs a folder; pass out to the run, or folder to {tracker}")
    return run.folder / tracker.lower()


def run_key(run: RunView, tracker: str) -> str:
    """Return a key that is the same after a resume; it is stored in the run folder before it is used."""
    if run.folder is None:
        return uuid.uuid4().hex
    path = run.folder / f".{tracker.lower()}-key"
    if path.exists() and (key := path.read_text().strip()):
        return key
    key = uuid.uuid4().hex
    write_atomically(path, key + "\n")
    return key
