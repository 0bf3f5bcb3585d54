"""Playing a study: all its runs in one batch for each data set, outcomes with how they were made."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedcover.data import load
from fedcover.engines.base import Engine
from fedcover.federation import Federation, run_many
from fedcover.history import RoundRecord
from fedcover.paper.experiments import Run, settings_of
from fedcover.paper.results import Outcome, how_made, outcome_of, save

Make = Callable[[Run, dict[str, Any]], Federation]


def play(
    path: Path,
    runs: Sequence[Run],
    make: Make,
    rounds: int,
    engine: Engine,
    data: str | Path | None = None,
    on_round: Callable[[Run, RoundRecord], None] = lambda run, record: None,
    command: str = "",
) -> float:
    """Run a study and write its outcomes; the seconds it took."""
    outcomes: dict[Run, Outcome] = {}
    came_from: dict[str, str] = {}
    began = time.perf_counter()
    for name in dict.fromkeys(run.experiment.data for run in runs):
        some = [run for run in runs if run.experiment.data == name]
        split = load(name, data)
        came_from[name] = split.train.provenance
        histories = run_many(
            [make(run, settings) for run, settings in zip(some, settings_of(some, split), strict=True)],
            rounds,
            split.test,
            engine=engine,
            on_round=lambda number, record, some=some: on_round(some[number], record),  # type: ignore[misc]
        )
        outcomes |= {run: outcome_of(run, history) for run, history in zip(some, histories, strict=True)}
    seconds = round(time.perf_counter() - began, 1)
    save(path, outcomes, rounds, how_made(command, len(runs), seconds, engine, came_from))
    return seconds
