"""What the runs came to, as one small JSON file that grows run by run."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedcover._files import write_atomically
from fedcover.engines.base import Engine
from fedcover.errors import InputError
from fedcover.federation.history import History, RoundRecord
from fedcover.version import __version__
from fedcover_experiments.runner import Experiment, ExperimentRun, Make, run_all

DIGITS = 4
"""Decimals that are kept of accuracies and losses: a test set of 10,000 has no more."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run: curves, and what was measured along the way."""

    data: str
    split: str
    technique: str
    code: str
    seed: int
    accuracy: list[float | None]
    """Of the global model, after each round; None where it was not looked at."""
    loss: list[float | None]
    local_accuracy: float | None
    """After the last round."""
    gamma_min: int
    pruning_noise: float
    """The mean over clients and rounds."""
    bytes_down: float
    """What a client downloads in a round, on average."""
    bytes_up: float
    uncovered: float | None = None
    """The share of the model that nobody held, mean over rounds; None in results that did not note it."""
    macs: float | None = None
    """Multiply-adds of one example, mean over clients and rounds, as a share of the whole model's."""

    def fits(self, rounds: int) -> bool:
        """Whether its curves have this many rounds of finite numbers, and the last was looked at."""
        curves = [*self.accuracy, *self.loss, self.local_accuracy, self.gamma_min, self.pruning_noise]
        numbers = all(value is None or math.isfinite(value) for value in curves)
        whole = len(self.accuracy) == len(self.loss) == rounds > 0 and isinstance(self.seed, int)
        return numbers and whole and self.accuracy[-1] is not None and self.loss[-1] is not None

    @property
    def run(self) -> ExperimentRun:
        """The run that this is the outcome of."""
        return ExperimentRun(Experiment(self.data, self.split, self.technique, self.code), self.seed)


def outcome_of(run: ExperimentRun, history: History) -> Outcome:
    """The outcome of a finished run."""
    sent = sum(len(record.cohort) for record in history)
    local = history.last.local_accuracy
    return Outcome(
        **asdict(run.experiment),
        seed=run.seed,
        accuracy=[None if value is None else round(value, DIGITS) for value in history.column("accuracy")],
        loss=[None if value is None else round(value, DIGITS) for value in history.column("loss")],
        local_accuracy=None if local is None else round(local, DIGITS),
        gamma_min=history.gamma_min,
        pruning_noise=round(sum(history.column("pruning_noise")) / len(history), DIGITS),
        bytes_down=round(sum(history.column("bytes_down")) / sent),
        bytes_up=round(sum(history.column("bytes_up")) / sent),
        uncovered=round(sum(history.column("uncovered")) / len(history), DIGITS),
        macs=round(sum(record.macs / record.macs_full for record in history) / len(history), DIGITS),
    )


def make(
    path: Path,
    runs: Sequence[ExperimentRun],
    rounds: int,
    engine: Engine,
    data: str | Path | None = None,
    out: Path | None = None,
    on_round: Callable[[ExperimentRun, RoundRecord], None] = lambda run, record: None,
    command: str = "",
    federation_of: Make | None = None,
    technique: str = "",
) -> float:
    """Play runs and write their outcomes, with the facts about how they were made; the seconds it took.

    ``technique`` says that all runs are of one; then it is noted what a round takes once all have played one, since the
    first waits for compilers.
    """
    began, played, warm = time.perf_counter(), 0, 0.0

    def counted(run: ExperimentRun, record: RoundRecord) -> None:
        nonlocal played, warm
        played += 1
        if played == len(runs):
            warm = time.perf_counter()
        on_round(run, record)

    histories, came_from = run_all(runs, rounds, engine, data, out, counted, federation_of)
    now = time.perf_counter()
    seconds = round(now - began, 1)
    if not played and path.exists() and any(facts["command"] == command for facts in load(path).made):
        return seconds  # all of it was there: how long it took is known from then
    outcomes = {run: outcome_of(run, history) for run, history in histories.items()}
    facts = how_made(command, len(runs), seconds, engine, came_from)
    if technique:
        facts |= {"technique": technique, "round_seconds": round((now - warm) / max(1, played - len(runs)), 4)}
    save(path, outcomes, rounds, facts)
    return seconds


def how_made(command: str, runs: int, seconds: float, engine: Engine, came_from: Mapping[str, str]) -> dict[str, Any]:
    """The facts about how some outcomes were made."""
    return {
        "command": command,
        "runs": runs,
        "seconds": seconds,
        "engine": str(engine),
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else "cpu",
        "data": dict(came_from),
        "versions": {"fedcover": __version__, "torch": torch.__version__},
    }


@dataclass(frozen=True)
class Results:
    """A file of outcomes: how many rounds all of them took, how they were made, and the outcomes by run."""

    rounds: int
    made: list[dict[str, Any]]
    outcomes: dict[ExperimentRun, Outcome]

    def of(self, experiment: Experiment) -> list[Outcome]:
        """The outcomes of an experiment, by seed; empty if it was not run."""
        return self._by_experiment.get(experiment, [])

    @cached_property
    def _by_experiment(self) -> dict[Experiment, list[Outcome]]:
        found: dict[Experiment, list[Outcome]] = {}
        for run in sorted(self.outcomes, key=lambda run: run.seed):
            found.setdefault(run.experiment, []).append(self.outcomes[run])
        return found


def save(path: Path, outcomes: Mapping[ExperimentRun, Outcome], rounds: int, made: Mapping[str, Any]) -> None:
    """Add outcomes to a file, and the facts about how they were made; those of other runs in it stay."""
    known = load(path) if path.exists() else Results(rounds, [], {})
    if known.rounds != rounds:
        raise InputError(f"{path} holds runs of {known.rounds} rounds; write these to another file")
    merged = {**known.outcomes, **outcomes}
    before = [facts for facts in known.made if facts["command"] != made["command"]]
    lines = ",\n".join(_line(_noted(merged[run])) for run in sorted(merged, key=lambda run: run.name))
    head = f'"rounds": {rounds},\n"made": {json.dumps([*before, made], indent=1)}'
    write_atomically(path, f'{{{head},\n"outcomes": [\n{lines}\n]}}\n'.encode())


def _noted(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data, without what was not noted."""
    return {key: value for key, value in asdict(outcome).items() if value is not None or key == "local_accuracy"}


def _line(item: Mapping[str, Any]) -> str:
    return json.dumps(item, separators=(",", ":"))


def load(path: Path, command: str = "fedcover paper run") -> Results:
    """The outcomes in a file, and how they were made; ``command`` makes such a file."""
    remedy = f"make them with `{command}`"
    if not path.exists():
        raise InputError(f"{path} is not there; {remedy}")
    try:
        content = json.loads(path.read_text())
        rounds, made = content["rounds"], content["made"]
        outcomes = [Outcome(**item) for item in content["outcomes"]]
        sound = isinstance(rounds, int) and all(map(_is_sound_fact, made)) and all(o.fits(rounds) for o in outcomes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise InputError(f"{path} does not hold results of runs, or is damaged; {remedy}")
    return Results(rounds, made, {outcome.run: outcome for outcome in outcomes})


def _is_sound_fact(made: Mapping[str, Any]) -> bool:
    """Whether an entry of how outcomes were made has all that a report needs."""
    texts = [made["command"], made["engine"], made["device"], *made["data"].values(), *made["versions"].values()]
    return all(isinstance(text, str) for text in texts) and made["seconds"] >= 0 and made["runs"] >= 0


def load_all(paths: Sequence[Path], command: str = "fedcover paper run") -> Results:
    """The outcomes in several files, as if they were one; ``command`` makes such files."""
    parts = [load(path, command) for path in paths]
    if len(lengths := {part.rounds for part in parts}) != 1:
        shown = " and ".join(map(str, sorted(lengths)))
        raise InputError(f"a report is about runs of equal length; these took {shown} rounds: name files that agree")
    outcomes = {run: outcome for part in parts for run, outcome in part.outcomes.items()}
    if not outcomes:
        raise InputError(f"{paths[0]} holds no outcomes yet; make some with `{command}`")
    return Results(parts[0].rounds, [made for part in parts for made in part.made], outcomes)
