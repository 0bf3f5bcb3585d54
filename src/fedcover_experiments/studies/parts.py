"""Playing a study: all its runs as one batch, or each technique by itself so that its seconds are its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError
from fedcover.federation.history import RoundRecord
from fedcover_experiments.results import make
from fedcover_experiments.runner import COHORT, Experiment, ExperimentRun
from fedcover_experiments.studies import STUDIES

Told = Callable[[ExperimentRun, RoundRecord], None]


@dataclass(frozen=True)
class Part:
    """What of a study is to be run: seeds from the first on, perhaps on one data set or by some techniques alone."""

    study: str
    seeds: int
    rounds: int
    first: int = 0
    on: str = ""
    only: str = ""
    """Techniques, with commas between them; all if empty."""

    def experiments(self) -> list[Experiment]:
        """The experiments of this part."""
        asked = STUDIES[self.study].experiments()
        every = {e.technique for e in asked}
        named = set(self.only.split(",")) if self.only else every
        found = [e for e in asked if self.on in ("", e.data) and e.technique in named]
        if not found or named - every:
            wanted = " and ".join(filter(None, (self.on, self.only)))
            known = ", ".join(dict.fromkeys(name for e in asked for name in (e.data, e.technique)))
            raise InputError(f"the study '{self.study}' has no runs of {wanted}; use some of {known}")
        return found

    @property
    def runs(self) -> list[ExperimentRun]:
        """Its runs."""
        return [
            ExperimentRun(e, seed) for e in self.experiments() for seed in range(self.first, self.first + self.seeds)
        ]

    @property
    def options(self) -> str:
        """It, as options of the command that runs it."""
        said = {"on": self.on, "only": self.only, "first": self.first}
        given = "".join(f" --{key} {value}" for key, value in said.items() if value)
        return f"{self.study}{given} --seeds {self.seeds} --rounds {self.rounds}"


def play(part: Part, command: str, path: Path, engine: str, data: str | None, told: Told) -> float:
    """Run a part of a study and write its outcomes; the seconds that it took."""
    study, total = STUDIES[part.study], 0.0
    pieces = [part]
    if study.apart:
        pairs = dict.fromkeys((e.data, e.technique) for e in part.experiments())
        pieces = [replace(part, on=data_set, only=only) for data_set, only in pairs]
    for piece in pieces:
        runs = piece.runs
        chosen = choose_engine(engine, cohort=COHORT * len(runs))
        technique = piece.only if study.apart else ""
        with chosen:
            total += make(
                path, runs, part.rounds, chosen, data, None, told, f"{command} {piece.options}", study.federation_of,
                technique,
            )  # fmt: skip
    return total
