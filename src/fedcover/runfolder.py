"""A run's folder: settings, versions, history, checkpoints, summary and report.

::

    config.toml      the settings in full            history.jsonl   one record a round
    versions.json    what ran it                     summary.json    when finished: the outcome
    checkpoints/     round-000012.safetensors        report.html     when finished: the page
"""

import fcntl
import json
import os
import platform
import tomllib
from pathlib import Path
from typing import Any

import torch

from fedcover import checkpoint
from fedcover.checkpoint import State
from fedcover.errors import InputError
from fedcover.files import write_atomically
from fedcover.history import History, RoundRecord
from fedcover.settings import Settings, differences, to_toml
from fedcover.version import __version__

KEPT_CHECKPOINTS = 2


def newest_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint in a run folder, if there is one."""
    found = sorted((path / "checkpoints").glob("round-*.safetensors"))
    return found[-1] if found else None


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a run folder was made with."""
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is not a run folder: it has no config.toml; name the folder of a run") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path / 'config.toml'} is corrupt ({error}); start anew with another folder") from error


class RunFolder:
    """A folder that one process at a time writes a run into."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = -1

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def open(self, settings: Settings, fingerprint: str, resume: bool) -> tuple[State, History] | None:
        """Take the folder for a run: new, or on from where it stopped (None if there is no checkpoint yet)."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file; name a folder for the run")
        config = self.path / "config.toml"
        if self.path.is_dir() and not config.exists():
            strangers = [p.name for p in self.path.iterdir() if p.name != ".lock"]
            if strangers:
                raise InputError(
                    f"{self.path} is not empty and no run folder (it holds {strangers[0]}); name a new folder"
                )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
        except OSError as error:
            raise InputError(f"{self.path} cannot be written to ({error}); name another folder") from error
        if config.exists() and not resume:
            done = newest_checkpoint(self.path)
            where = f"a run of {int(done.stem.split('-')[1])} rounds" if done else "a run"
            self._give_up(f"{self.path} already holds {where}; go on with --resume, or name another folder")
        found = None
        if config.exists():
            newest = newest_checkpoint(self.path)
            try:
                changed = differences(read_settings(self.path), tomllib.loads(to_toml(settings)))
                if newest:
                    state, history, made_with = checkpoint.load(newest)
                    if made_with != fingerprint and not changed:
                        changed = ["its data or its first model are not the same"]
                    found = state, history
            except InputError:
                self.close()
                raise
            if changed:
                self._give_up(
                    f"{self.path} was begun with other settings: {'; '.join(changed)};"
                    f" resume with the same ones, or name another folder"
                )
        write_atomically(config, to_toml(settings))
        write_atomically(self.path / "versions.json", json.dumps(versions(), indent=2) + "\n")
        write_atomically(self.path / "history.jsonl", found[1].to_lines() if found else "")
        (self.path / "summary.json").unlink(missing_ok=True)
        return found

    def append(self, record: RoundRecord) -> None:
        """Add a round's record to the history."""
        with open(self.path / "history.jsonl", "a") as file:
            file.write(record.to_json() + "\n")

    def save(self, state: State, history: History, fingerprint: str) -> None:
        """Write a checkpoint, and drop all but the newest few."""
        folder = self.path / "checkpoints"
        checkpoint.save(folder / f"round-{state.round:06d}.safetensors", state, history, fingerprint)
        for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT_CHECKPOINTS]:
            old.unlink()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary and, where matplotlib is installed, the report."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")
        try:
            from fedcover.report import write_report
        except ImportError:
            return
        write_report([self.path])

    def _take_lock(self) -> None:
        # The kernel drops the lock with the process, so a killed run leaves nothing stale behind.
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 32).decode(errors="replace").strip() or "another process"
            self._give_up(f"{self.path} is in use by process {owner}; wait for it, or name another folder")
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    def _give_up(self, why: str) -> None:
        self.close()
        raise InputError(why)


def versions() -> dict[str, str]:
    """What ran: the versions that a result may depend on."""
    return {
        "fedcover": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_threads": str(torch.get_num_threads()),
    }
