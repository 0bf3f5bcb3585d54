"""Outcomes of runs, kept in one small JSON file that grows with every command."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedcover._files import make_folder, write_atomically
from fedcover.engines.base import Engine
from fedcover.errors import InputError
from fedcover.federation.history import History, RoundRecord
from fedcover.version import __version__
from fedcover_experiments.runner import (
    Experiment,
    ExperimentRun,
    FederationFactory,
    OnRound,
    by_policy,
    ignore_round,
    run_all,
)

try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]

DIGITS = 4
"""Decimals of accuracies and losses that are kept: a test set of 10,000 examples has no more."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run: curves, and measurements along the way."""

    data: str
    split: str
    policy: str
    code: str
    seed: int
    accuracy: list[float | None]
    """Accuracy of the global model after each round; None where it was not evaluated."""
    loss: list[float | None]
    """Test loss of the global model after each round; None where it was not evaluated or is not finite."""
    local_accuracy: float | None
    """Local accuracy after the last round."""
    gamma_min: int
    pruning_noise: float
    """Mean over clients and rounds."""
    bytes_down: float
    """Bytes that a client downloads in a round, on average."""
    bytes_up: float
    """Bytes that a client uploads in a round, on average."""
    uncovered: float | None = None
    """Share of the model that no client held, mean over rounds; None in older results."""
    macs: float | None = None
    """Multiply-adds of one example as a share of the full model's, mean over clients and rounds; None likewise."""
    diverged: int | None = None
    """The round from which on the loss is not finite. If all clients have diverged, accuracy is that of guessing."""

    def is_sound(self, rounds: int) -> bool:
        """Return whether the curves have this many rounds, all numbers are finite and the last round was evaluated."""
        numbers = [*self.accuracy, *self.loss, self.local_accuracy, self.gamma_min, self.pruning_noise]
        finite = all(value is None or math.isfinite(value) for value in numbers)
        whole = len(self.accuracy) == len(self.loss) == rounds > 0 and isinstance(self.seed, int)
        return finite and whole and self.accuracy[-1] is not None and (self.loss[-1] is not None or bool(self.diverged))

    @property
    def run(self) -> ExperimentRun:
        """The run that led to this outcome."""
        return ExperimentRun(Experiment(self.data, self.split, self.policy, self.code), self.seed)


def outcome_of(run: ExperimentRun, history: History, rounds: int, classes: int) -> Outcome:
    """Return the outcome of a run, which has ended early if its clients have diverged.

    Args:
        run: The run.
        history: Its records, at least one.
        rounds: The rounds that it was to have.
        classes: The number of classes, of which a model that has diverged guesses one.
    """
    sent, missing = sum(len(record.cohort) for record in history), rounds - len(history)
    guess = _rounded(1 / classes)
    return Outcome(
        **asdict(run.experiment),
        seed=run.seed,
        accuracy=[*(_rounded(value) for value in history.column("accuracy")), *[guess] * missing],
        loss=[*(_rounded(value) for value in history.column("loss")), *[None] * missing],
        local_accuracy=guess if missing else _rounded(history.last.local_accuracy),
        gamma_min=history.gamma_min,
        pruning_noise=round(sum(history.column("pruning_noise")) / len(history), DIGITS),
        bytes_down=round(sum(history.column("bytes_down")) / sent),
        bytes_up=round(sum(history.column("bytes_up")) / sent),
        uncovered=round(sum(history.column("uncovered")) / len(history), DIGITS),
        macs=round(sum(record.macs / record.macs_full for record in history) / len(history), DIGITS),
        diverged=len(history) + 1 if missing else _first_without_loss(history),
    )


def _first_without_loss(history: History) -> int | None:
    """Return the round from which on the loss of evaluated models is not finite; None if the last loss is finite."""
    first = None
    for record in reversed([record for record in history if record.accuracy is not None]):
        if record.loss is not None:
            break
        first = record.round
    return first


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)


def run_and_save(
    path: Path,
    runs: Sequence[ExperimentRun],
    rounds: int,
    engine: Engine,
    *,
    data: str | Path | None = None,
    out: Path | None = None,
    on_round: OnRound = ignore_round,
    command: str = "",
    federation_of: FederationFactory = by_policy,
    policy: str = "",
) -> float:
    """Run experiments, add their outcomes to a file, and return the seconds that it took.

    Arguments that are not listed here are those of ``runner.run_all``.

    Args:
        path: The file of results, which is created or extended.
        command: The command line, which the file keeps with the outcomes.
        policy: The policy of all these runs, if it is only one. The file then also keeps the seconds per round,
            without the first round, which includes compilation.
    """
    start, played, warm = time.perf_counter(), 0, 0.0

    def count_round(run: ExperimentRun, record: RoundRecord) -> None:
        nonlocal played, warm
        played += 1
        if played == len(runs):
            warm = time.perf_counter()
        on_round(run, record)

    results = run_all(runs, rounds, engine, data, out, count_round, federation_of)
    end = time.perf_counter()
    seconds = round(end - start, 1)
    if not played and path.exists() and any(entry["command"] == command for entry in load(path).provenance):
        return seconds  # all runs were finished before: the file has the time that they took
    classes = results.classes
    outcomes = {
        run: outcome_of(run, history, rounds, classes[run.experiment.data])
        for run, history in results.histories.items()
    }
    entry = provenance_of(command, len(runs), seconds, engine, results.provenance)
    if policy:  # without a round after the first of each run, there is no time to measure
        measured = round((end - warm) / (played - len(runs)), 4) if played > len(runs) else None
        entry |= {"policy": policy, **({} if measured is None else {"round_seconds": measured})}
    save(path, outcomes, rounds, entry)
    return seconds


def provenance_of(command: str, runs: int, seconds: float, engine: Engine, data: Mapping[str, str]) -> dict[str, Any]:
    """Return how outcomes came about: command, time, device, data sets and versions."""
    return {
        "command": command,
        "runs": runs,
        "seconds": seconds,
        "engine": str(engine),
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "data": dict(data),
        "versions": {"fedcover": __version__, "torch": torch.__version__},
    }


@dataclass(frozen=True)
class Results:
    """The outcomes in one file or in several."""

    rounds: int
    """Rounds of every run."""
    provenance: list[dict[str, Any]]
    """One entry for each command that produced outcomes, as ``provenance_of`` returns it."""
    outcomes: dict[ExperimentRun, Outcome]

    def of(self, experiment: Experiment) -> list[Outcome]:
        """Return the outcomes of an experiment, ordered by seed; none if it was not run."""
        return self._by_experiment.get(experiment, [])

    @cached_property
    def _by_experiment(self) -> dict[Experiment, list[Outcome]]:
        groups: dict[Experiment, list[Outcome]] = {}
        for run in sorted(self.outcomes, key=lambda run: run.seed):
            groups.setdefault(run.experiment, []).append(self.outcomes[run])
        return groups


@contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Enter a context in which no other process changes a file of results, if all of them enter it.

    Several processes can then add their outcomes to one file. A hidden file beside it is locked, as far as the system
    has file locks; it stays, since another process may wait for it.
    """
    make_folder(path.parent)
    if fcntl is None:
        yield
        return
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)  # NFS locks no folders
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def save(path: Path, outcomes: Mapping[ExperimentRun, Outcome], rounds: int, entry: Mapping[str, Any]) -> None:
    """Add outcomes and their provenance to a file; outcomes of other runs in the file, or of other processes, stay."""
    if unsound := [run.name for run, outcome in outcomes.items() if not outcome.is_sound(rounds)]:
        raise InputError(f"the outcome of {unsound[0]} is not one of {rounds} rounds with accuracies; it is not stored")
    with sole_writer(path):
        previous = load(path) if path.exists() else Results(rounds, [], {})
        if previous.rounds != rounds:
            raise InputError(f"{path} has runs of {previous.rounds} rounds; write runs of {rounds} to another file")
        merged = {**previous.outcomes, **outcomes}
        entries = [other for other in previous.provenance if other["command"] != entry["command"]]
        stored = [_to_stored(other) for other in (*entries, entry)]
        lines = ",\n".join(_line(merged[run]) for run in sorted(merged, key=lambda run: run.name))
        head = f'"rounds": {rounds},\n"made": {json.dumps(stored, indent=1)}'
        write_atomically(path, f'{{{head},\n"outcomes": [\n{lines}\n]}}\n'.encode())


def _line(outcome: Outcome) -> str:
    """Return an outcome as one line of JSON, without values that were not measured."""
    item = {key: value for key, value in asdict(outcome).items() if value is not None or key == "local_accuracy"}
    return json.dumps(_to_stored(item), separators=(",", ":"))


def _to_stored(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item with the keys of the file format, in which a policy is a ``technique``."""
    return {"technique" if key == "policy" else key: value for key, value in item.items()}


def _from_stored(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item of a file with the keys that the code uses."""
    return {"policy" if key == "technique" else key: value for key, value in item.items()}


def load(path: Path, command: str = "fedcover paper run") -> Results:
    """Return the outcomes in a file; an error names ``command`` as the way to produce such a file."""
    remedy = f"produce it with `{command}`"
    if not path.exists():
        raise InputError(f"{path} does not exist; {remedy}")
    try:
        content = json.loads(path.read_text())
        rounds, entries = content["rounds"], [_from_stored(entry) for entry in content["made"]]
        outcomes = [Outcome(**_from_stored(item)) for item in content["outcomes"]]
        sound = isinstance(rounds, int) and all(map(_is_sound, entries)) and all(o.is_sound(rounds) for o in outcomes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise InputError(f"{path} is damaged or is not a file of results; {remedy}")
    return Results(rounds, entries, {outcome.run: outcome for outcome in outcomes})


def _is_sound(entry: Mapping[str, Any]) -> bool:
    """Return whether an entry of provenance has everything that a report needs."""
    texts = [entry["command"], entry["engine"], entry["device"], *entry["data"].values(), *entry["versions"].values()]
    return all(isinstance(text, str) for text in texts) and entry["seconds"] >= 0 and entry["runs"] >= 0


def load_all(paths: Sequence[Path], command: str = "fedcover paper run") -> Results:
    """Return the outcomes in several files as if they were one; errors name ``command`` as in ``load``."""
    parts = [load(path, command) for path in paths]
    if len(lengths := {part.rounds for part in parts}) != 1:
        shown = " and ".join(map(str, sorted(lengths)))
        raise InputError(f"all files must have runs of the same length; got {shown} rounds: name files that agree")
    outcomes = {run: outcome for part in parts for run, outcome in part.outcomes.items()}
    if not outcomes:
        raise InputError(f"{paths[0]} has no outcomes yet; produce some with `{command}`")
    return Results(parts[0].rounds, [entry for part in parts for entry in part.provenance], outcomes)
