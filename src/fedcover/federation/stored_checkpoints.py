"""The checkpoints of a run folder: which one a resume continues from, and what happens to those that cannot be used."""

import json
import os
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fedcover._files import append_text, write_error
from fedcover.errors import CheckpointWarning, InputError
from fedcover.federation import checkpoint
from fedcover.federation.checkpoint import Checkpoint, CorruptCheckpointError

KEPT_CHECKPOINTS = 2
"""How many checkpoints a run keeps, so that one is left if the newest is damaged."""
FOLDER = "checkpoints"
RECOVERIES = "recoveries.jsonl"
"""The file that lists checkpoints which could not be used, one JSON line each."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """The checkpoint from which a run can continue, and newer ones that cannot be used."""

    checkpoint: Checkpoint | None
    """None if the folder has no checkpoint."""
    unusable: dict[Path, str] = field(default_factory=dict)
    """The reason for each newer file."""

    def set_aside(self, folder: Path) -> None:
        """Rename unusable files to ``*.corrupt``, record that in the run folder, and warn of each."""
        for file, reason in self.unusable.items():
            aside = file.with_name(file.name + ".corrupt")
            try:
                os.replace(file, aside)
            except OSError as error:
                raise write_error(aside, error) from error
            after = self.checkpoint.state.round if self.checkpoint else 0
            row = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "file": aside.name, "reason": reason}
            append_text(folder / RECOVERIES, json.dumps({**row, "continued_after_round": after}) + "\n")
            warnings.warn(
                f"checkpoint {file} cannot be used because {reason}; it is kept as {aside.name}, and the run continues"
                f" after round {after}",
                CheckpointWarning,
                stacklevel=6,
            )


def checkpoint_files(path: Path) -> dict[Path, int]:
    """Return the checkpoints of a run folder with the rounds in their names, the newest first."""
    rounds = {file: file.stem.removeprefix("round-") for file in (path / FOLDER).glob("round-*.safetensors")}
    numbers = {file: int(text) for file, text in rounds.items() if text.isdecimal()}
    return dict(sorted(numbers.items(), key=lambda row: row[1], reverse=True))


def newest_checkpoint(path: Path) -> Path | None:
    """Return the newest checkpoint in a run folder; None if there is none."""
    return next(iter(checkpoint_files(path)), None)


def find_checkpoint(path: Path, fingerprint: str) -> StoredCheckpoint:
    """Return the newest checkpoint of a run that can be used; nothing is changed.

    A whole checkpoint of another run is returned if there is none of this run, so that the caller can say what differs.

    Args:
        path: The run folder.
        fingerprint: The digest of what decides the run's bits.

    Raises:
        InputError: If the folder has checkpoints, and all of them are damaged.
    """
    unusable: dict[Path, str] = {}
    other: Checkpoint | None = None
    for file, number in checkpoint_files(path).items():
        try:
            stored = checkpoint.load(file)
        except CorruptCheckpointError as error:
            unusable[file] = error.reason
            continue
        if stored.state.round != number:
            unusable[file] = f"it is a checkpoint of round {stored.state.round}"
        elif stored.fingerprint != fingerprint:
            unusable[file] = "it belongs to another run"
            other = other or stored
        else:
            return StoredCheckpoint(stored, unusable)
    if unusable and other is None:
        reasons = "; ".join(f"{file.name}: {reason}" for file, reason in unusable.items())
        raise InputError(
            f"no checkpoint in {path / FOLDER} can be used ({reasons}); restore one from a copy, or start again in"
            f" another folder"
        )
    return StoredCheckpoint(other)


def delete_old_checkpoints(path: Path) -> None:
    """Delete all checkpoints but the newest few."""
    for old in list(checkpoint_files(path))[KEPT_CHECKPOINTS:]:
        old.unlink()
