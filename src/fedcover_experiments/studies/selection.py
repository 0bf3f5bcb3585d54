"""Run a study or some of it: all runs as one batch, or one batch per policy so that its time can be measured."""

from dataclasses import dataclass, replace
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError
from fedcover_experiments.results import run_and_save
from fedcover_experiments.runner import COHORT, Experiment, ExperimentRun, OnRound
from fedcover_experiments.studies.registry import STUDIES


@dataclass(frozen=True)
class StudySelection:
    """The runs of a study that a command asks for."""

    study: str
    seeds: int
    rounds: int
    first: int = 0
    """The first seed."""
    on: str = ""
    """The only data set, such as ``mnist``, or data set and split, such as ``mnist/iid``; all if empty."""
    only: str = ""
    """The only policies, separated by commas, of which some may be ``FILE.py:NAME``; all of the study's if empty."""
    budgets: str = ""
    """The only code of budgets; all if empty."""
    precision: str = "fp32"
    """How passes compute."""
    untimed: bool = False
    """Whether no seconds per round are recorded, since other processes use the device at the same time."""

    def experiments(self) -> list[Experiment]:
        """Return the experiments of this selection.

        Raises:
            InputError: The study has none on this data set, of these policies or with these budgets.
        """
        available = STUDIES[self.study].experiments()
        own_experiments = STUDIES[self.study].own_experiments
        for name in self.only.split(","):
            available += own_experiments(name) if own_experiments and ":" in name else []
        policies = {e.policy for e in available}
        wanted = set(self.only.split(",")) if self.only else policies
        chosen = [
            e
            for e in available
            if self.on in ("", e.data, f"{e.data}/{e.split}") and e.policy in wanted and self.budgets in ("", e.code)
        ]
        if not chosen or wanted - policies:
            requested = " and ".join(filter(None, (self.on, self.only, self.budgets)))
            names = ", ".join(dict.fromkeys(name for e in available for name in (e.data, e.policy, e.code)))
            raise InputError(f"the study '{self.study}' has no runs of {requested}; use some of {names}")
        return chosen

    @property
    def runs(self) -> list[ExperimentRun]:
        """Every experiment with every seed."""
        seeds = range(self.first, self.first + self.seeds)
        return [ExperimentRun(experiment, seed) for experiment in self.experiments() for seed in seeds]

    @property
    def options(self) -> str:
        """The options of the command that runs this selection."""
        options = {"on": self.on, "only": self.only, "budgets": self.budgets, "first": self.first}
        options |= {"precision": self.precision} if self.precision != "fp32" else {}
        text = "".join(f" --{key} {value}" for key, value in options.items() if value)
        text += " --untimed" if self.untimed else ""
        return f"{self.study}{text} --seeds {self.seeds} --rounds {self.rounds}"

    def batches(self) -> list["StudySelection"]:
        """Return the selections that are run as one batch each."""
        if not STUDIES[self.study].separate:
            return [self]
        pairs = dict.fromkeys((e.data, e.policy) for e in self.experiments())
        return [replace(self, on=self.on or data, only=policy) for data, policy in pairs]


def run_selection(
    selection: StudySelection,
    command: str,
    path: Path,
    engine: str,
    data: str | None,
    on_round: OnRound,
    out: Path | None = None,
) -> float:
    """Run a selection, add its outcomes to the file ``path``, and return the seconds that it took.

    With ``out``, a folder for the runs, those that are already there are resumed.
    """
    study, total = STUDIES[selection.study], 0.0
    for batch in selection.batches():
        runs = batch.runs
        with choose_engine(engine, cohort=COHORT * len(runs), precision=selection.precision) as chosen:
            total += run_and_save(
                path,
                runs,
                selection.rounds,
                chosen,
                data=data,
                out=out,
                on_round=on_round,
                command=f"{command} {batch.options}",
                federation_of=study.federation_of,
                policy=batch.only if study.separate and not batch.untimed else "",
            )
    return total
