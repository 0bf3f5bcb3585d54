"""A run's folder: settings, versions, history, checkpoints and summary.

::

    config.toml      all settings                    history.jsonl   one record per round
    versions.json    versions of what ran            summary.json    the outcome, once finished
    method.json      model, loss, policy, recipe     report.html     written by `fedcover run` and `report`
    checkpoints/     round-000012.safetensors        best.safetensors, metrics.csv, ...   written by callbacks
    recoveries.jsonl checkpoints that were damaged; they are kept as checkpoints/round-000012.safetensors.corrupt
"""

import json
import os
import platform
import tomllib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcover._files import append_text, make_folder, write_atomically, write_error
from fedcover.errors import FolderError, InputError
from fedcover.federation import checkpoint
from fedcover.federation.callbacks.keep_best import BEST
from fedcover.federation.checkpoint import Checkpoint, State
from fedcover.federation.fingerprint import Method, differences, method_differences
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.stored_checkpoints import (
    StoredCheckpoint,
    checkpoint_files,
    delete_old_checkpoints,
    find_checkpoint,
    newest_checkpoint,
)
from fedcover.params import Params, prune, put_params
from fedcover.policies.base import shown_in
from fedcover.toml import Settings, to_toml
from fedcover.version import __version__

try:
    import fcntl
except ImportError:  # only POSIX systems have it
    fcntl = None  # type: ignore[assignment]

OTHER = "the data, the loss, the initial model or the kind of engine differ"
"""What can be said of a folder that an older version wrote, without ``method.json``."""


def read_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the run in a folder."""
    try:
        return tomllib.loads((path / "config.toml").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{path} is not a run folder: it has no config.toml; name the folder of a run") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path / 'config.toml'} cannot be read ({error}); start again in another folder") from error


def load_model(path: str | os.PathLike[str], model: nn.Module, best: bool = False) -> nn.Module:
    """Load the parameters of a run's newest checkpoint into a model and return it.

    Args:
        path: The run folder.
        model: A module with the run's parameter names and shapes. It is changed in place, and pruned if the run's
            policy has one mask for all clients.
        best: Load the best model, which the callback ``KeepBest`` has written, instead of the newest.

    Raises:
        InputError: If there is no checkpoint, or it belongs to another model.
    """
    newest, theta = _best_of(Path(path)) if best else _newest_of(Path(path))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in theta.items()}:
        raise InputError(
            f"{newest} belongs to another model than {type(model).__name__}: names or shapes differ; pass the model"
            f" that the run trained"
        )
    put_params(model, theta)
    return model


def load_history(path: Path) -> History:
    """Return the history of a finished run, with its summary, its state and the trained model."""
    history = History.load(path / "history.jsonl")
    history.summary = json.loads((path / "summary.json").read_text())
    history.state = checkpoint.load(_newest(path)).state
    history.theta = prune(history.state.theta, shown_in(history.state.policy))
    return history


def _newest(path: Path) -> Path:
    """Return the newest checkpoint of a run; raise InputError if there is none."""
    newest = newest_checkpoint(path)
    if newest is None:
        raise InputError(f"{path} has no checkpoint; name the folder of a run that has played a round")
    return newest


def _newest_of(path: Path) -> tuple[Path, Params]:
    """Return the newest checkpoint of a run, and its model."""
    newest = _newest(path)
    state = checkpoint.load(newest).state
    return newest, prune(state.theta, shown_in(state.policy))


def _best_of(path: Path) -> tuple[Path, Params]:
    """Return the file of the best model of a run, and the model."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (path / BEST).exists():
        raise InputError(f"{path} has no {BEST}; run it with the callback KeepBest")
    try:
        return path / BEST, load_file(path / BEST)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path / BEST} is truncated or damaged ({error}); load the newest model instead") from error


class RunFolder:
    """The folder of a run, written by one process at a time.

    A file lock keeps other processes out. Systems without ``fcntl``, such as Windows, give a warning instead: there
    the caller must make sure that no other process writes to the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lock = -1

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder."""
        unlock_folder(self._lock)
        self._lock = -1

    def open(
        self,
        settings: Settings,
        fingerprint: str,
        resume: bool,
        rounds: int,
        trim: Callable[[Checkpoint], History] = lambda stored: stored.history,
        method: Method | None = None,
    ) -> Checkpoint | None:
        """Lock the folder for a run and return the newest checkpoint of the run that it holds; None if it is new.

        Nothing in the folder is changed before everything has been checked. A damaged checkpoint is then renamed to
        ``*.corrupt``, and the one before it is returned.

        Args:
            settings: The settings of the run.
            fingerprint: The digest of what decides the run's bits.
            resume: Whether to continue the run in the folder.
            rounds: The number of rounds of the run.
            trim: Returns the history of a shorter or stopped run as this run would have made it.
            method: What is trained, and how; a folder without ``method.json``, of an older version, fits any.

        Raises:
            FolderError: If the folder cannot be used, or holds another run; the message says what differs.
        """
        if self.path.exists() and not self.path.is_dir():
            raise FolderError(f"{self.path} is a file; name a folder for the run")
        config = self.path / "config.toml"
        if self.path.is_dir() and not config.exists():
            # A process may be killed after it wrote method.json, or a part of it, and before config.toml.
            own = (".lock", "method.json")
            strangers = [p.name for p in self.path.iterdir() if p.name not in own and not p.match(".*.part")]
            if strangers:
                raise FolderError(
                    f"{self.path} is not empty and not a run folder (it holds {strangers[0]}); name a new folder"
                )
        make_folder(self.path)
        self._lock = lock_folder(self.path)
        try:
            resumable = StoredCheckpoint(None)
            if config.exists():
                resumable = self._stored_run(settings, fingerprint, resume, rounds, method or {})
            for draft in [*self.path.glob(".*.part"), *self.path.glob("checkpoints/.*.part")]:
                draft.unlink()  # left by a process that was killed while writing
        except OSError as error:
            self.close()
            raise write_error(self.path, error) from error
        except InputError:
            self.close()
            raise
        resumable.set_aside(self.path)
        stored = resumable.checkpoint
        if stored:
            stored = stored._replace(history=trim(stored))
        if method:
            write_atomically(self.path / "method.json", json.dumps(method, indent=1) + "\n")
        write_atomically(config, to_toml(settings))
        write_atomically(self.path / "versions.json", json.dumps(versions(), indent=2) + "\n")
        write_atomically(self.path / "history.jsonl", stored.history.to_lines() if stored else "")
        (self.path / "summary.json").unlink(missing_ok=True)
        return stored

    def _stored_run(
        self, settings: Settings, fingerprint: str, resume: bool, rounds: int, method: Method
    ) -> StoredCheckpoint:
        """Return the newest usable checkpoint in the folder; raise InputError if it belongs to another run."""
        if not resume:
            done = next(iter(checkpoint_files(self.path).values()), 0)
            raise FolderError(
                f"{self.path} already holds a run of {done} rounds; continue it with resume=True (--resume on the"
                f" command line), or name another folder"
            )
        resumable = find_checkpoint(self.path, fingerprint)
        stored = resumable.checkpoint
        self._check_same(settings, method, stored is None or stored.fingerprint == fingerprint)
        if stored and (done := stored.state.round) > rounds:
            raise FolderError(f"{self.path} already has {done} rounds; rounds must be at least {done}")
        return resumable

    def compare(self, settings: Settings, method: Method, fingerprint_of: Callable[[str], str] | None = None) -> None:
        """Raise InputError if the folder holds a run of other settings, code or data; nothing is changed.

        Args:
            settings: The settings of the run.
            method: What is trained, and how, without an engine.
            fingerprint_of: Returns the fingerprint of the run with an engine's arithmetic, such as ``serial``; None if
                data and the initial model are not compared.
        """
        if fingerprint_of is None:
            self._check_same(settings, method, same_fingerprint=True)
            return
        arithmetic = self._stored_method().get("engine", {}).get("")
        fingerprint = fingerprint_of(str(arithmetic)) if arithmetic else ""
        stored = find_checkpoint(self.path, fingerprint).checkpoint if arithmetic else None
        self._check_same(settings, method, stored is None or stored.fingerprint == fingerprint)

    def _check_same(self, settings: Settings, method: Method, same_fingerprint: bool) -> None:
        """Raise InputError with what differs from the run in the folder, if anything does."""
        changed = differences(read_settings(self.path), tomllib.loads(to_toml(settings)))
        changed = changed or method_differences(self._stored_method(), method)
        if not same_fingerprint and not changed:
            kinds = (
                "the data or the initial model"
                if self._stored_method()
                else "the data, the loss, the model or the engine"
            )
            changed = [f"{kinds} differ"]
        if changed:
            raise FolderError(
                f"{self.path} was started with other settings: {'; '.join(changed)};"
                f" resume with the same ones, or name another folder"
            )

    def _stored_method(self) -> dict[str, Any]:
        """Return the method that the folder stores; an empty one if it was written by an older version."""
        try:
            stored = json.loads((self.path / "method.json").read_text())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise FolderError(f"{self.path / 'method.json'} cannot be read ({error}); name another folder") from error
        return stored if isinstance(stored, dict) else {}

    def append(self, record: RoundRecord) -> None:
        """Append a round's record to the history."""
        append_text(self.path / "history.jsonl", record.to_json() + "\n")

    def save(self, state: State, history: History, fingerprint: str, callbacks: Mapping[str, Any]) -> None:
        """Write a checkpoint and delete all but the newest few."""
        folder = self.path / "checkpoints"
        checkpoint.save(folder / f"round-{state.round:06d}.safetensors", state, history, fingerprint, callbacks)
        delete_old_checkpoints(self.path)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")


def lock_folder(path: Path) -> int:
    """Lock a folder for this process and return the lock, which ``unlock_folder`` takes; -1 without file locks.

    Raises:
        FolderError: If another process has locked the folder.
    """
    if fcntl is None:
        note = f"this system has no file locks; make sure that no other process writes to {path}"
        warnings.warn(note, RuntimeWarning, stacklevel=3)
        return -1
    # The kernel releases the lock with the process, so a killed run leaves no stale lock.
    try:
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(path / ".lock", error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 32).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise FolderError(f"{path} is in use by process {owner}; wait for it, or name another folder") from None
    try:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
    except OSError as error:
        os.close(lock)
        raise write_error(path / ".lock", error) from error
    return lock


def unlock_folder(lock: int) -> None:
    """Release the lock of a folder."""
    if lock >= 0:
        os.close(lock)


def versions() -> dict[str, str]:
    """Return the versions that a result may depend on."""
    return {
        "fedcover": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_threads": str(torch.get_num_threads()),
    }
