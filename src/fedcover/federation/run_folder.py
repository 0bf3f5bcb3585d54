"""A run's folder: settings, versions, history, checkpoints, summary and report.

::

    config.toml      the settings in full            history.jsonl   one record a round
    versions.json    what ran it                     summary.json    when finished: the outcome
    checkpoints/     round-000012.safetensors        report.html     written by `fedcover run` and `report`
"""

import json
import os
import platform
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.federation import checkpoint
from fedcover.federation.checkpoint import State
from fedcover.federation.fingerprint import differences
from fedcover.federation.history import History, RoundRecord
from fedcover.params import prune, put_params
from fedcover.policies.base import shown_in
from fedcover.toml import Settings, to_toml
from fedcover.version import __version__

try:
    import fcntl
except ImportError:  # only POSIX systems have it
    fcntl = None  # type: ignore[assignment]

KEPT_CHECKPOINTS = 2


def newest_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint in a run folder, if there is one."""
    found = [p for p in (path / "checkpoints").glob("round-*.safetensors") if p.stem.removeprefix("round-").isdecimal()]
    return max(found, key=lambda p: int(p.stem.removeprefix("round-")), default=None)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that a run folder was made with."""
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} is not a run folder: it has no config.toml; name the folder of a run") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path / 'config.toml'} cannot be read ({error}); start anew with another folder") from error


def load_model(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """The module with the parameters of a run's newest checkpoint put in, pruned if its policy has one mask for all."""
    newest = newest_checkpoint(Path(path))
    if newest is None:
        raise InputError(f"{path} has no checkpoint; name the folder of a run that has played a round")
    state = checkpoint.load(newest)[0]
    theta = prune(state.theta, shown_in(state.policy))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in theta.items()}:
        raise InputError(f"{newest} is of another model than {type(model).__name__}: names or shapes differ")
    put_params(model, theta)
    return model


class RunFolder:
    """A folder that one process at a time writes a run into.

    A file lock keeps other processes out. Systems without ``fcntl``, such as Windows, get a warning instead: there
    the caller must make sure that no other process writes into the folder.
    """

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

    def open(
        self,
        settings: Settings,
        fingerprint: str,
        resume: bool,
        rounds: int,
        trim: Callable[[RoundRecord], RoundRecord] = lambda record: record,
    ) -> tuple[State, History] | None:
        """Take the folder for a run of this many rounds: None for a new one, or where an old one stopped.

        Nothing in the folder is touched before everything has been checked.
        """
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
            found = self._find(settings, fingerprint, resume, rounds) if config.exists() else None
        except OSError as error:
            self.close()
            raise InputError(f"{self.path} cannot be written to ({error}); name another folder") from error
        except InputError:
            self.close()
            raise
        if found:
            found = found[0], History([trim(record) for record in found[1]])
        for draft in [*self.path.glob(".*.part"), *self.path.glob("checkpoints/.*.part")]:
            draft.unlink()  # left behind by a process that was killed while it wrote
        write_atomically(config, to_toml(settings))
        write_atomically(self.path / "versions.json", json.dumps(versions(), indent=2) + "\n")
        write_atomically(self.path / "history.jsonl", found[1].to_lines() if found else "")
        (self.path / "summary.json").unlink(missing_ok=True)
        return found

    def _find(self, settings: Settings, fingerprint: str, resume: bool, rounds: int) -> tuple[State, History] | None:
        """What the run in this folder has come to, if it is this run."""
        newest = newest_checkpoint(self.path)
        done = int(newest.stem.removeprefix("round-")) if newest else 0
        if not resume:
            raise InputError(
                f"{self.path} already holds a run of {done} rounds; go on with --resume, or name another folder"
            )
        changed = differences(read_settings(self.path), tomllib.loads(to_toml(settings)))
        found = checkpoint.load(newest) if newest else None
        if found and found[2] != fingerprint and not changed:
            changed = ["its data, its loss, its first model or its kind of engine are not the same"]
        if changed:
            raise InputError(
                f"{self.path} was begun with other settings: {'; '.join(changed)};"
                f" resume with the same ones, or name another folder"
            )
        if done > rounds:
            raise InputError(f"{self.path} has played {done} rounds already; ask for {done} or more")
        return found[:2] if found else None

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
        """Write the summary."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def _take_lock(self) -> None:
        if fcntl is None:
            note = f"this system has no file locks; make sure that no other process writes to {self.path}"
            warnings.warn(note, RuntimeWarning, stacklevel=2)
            return
        # The kernel drops the lock with the process, so a killed run leaves nothing stale behind.
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._lock, 32).decode(errors="replace").strip() or "another process"
            raise InputError(f"{self.path} is in use by process {owner}; wait for it, or name another folder") from None
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())


def versions() -> dict[str, str]:
    """What ran: the versions that a result may depend on."""
    return {
        "fedcover": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_threads": str(torch.get_num_threads()),
    }
