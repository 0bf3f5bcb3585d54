"""Run a study or some of it, in batches: the runs on one data set and split, or of one policy, to measure its time."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fedcover.engines.choose import choose_engine
from fedcover.errors import InputError
from fedcover_experiments.parallel import cores_of, results_of
from fedcover_experiments.results import run_and_save
from fedcover_experiments.runner import COHORT, Experiment, ExperimentRun, OnProgress, ignore_progress
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
        return f"{self.study}{text} --seeds {self.seeds} --rounds {self.rounds}"

    def batches(self) -> list["StudySelection"]:
        """Return the selections that are run as one batch each."""
        experiments = self.experiments()
        if STUDIES[self.study].timed:
            pairs = dict.fromkeys((e.data, e.policy) for e in experiments)
            return [replace(self, on=self.on or data, only=policy) for data, policy in pairs]
        batches = []
        for on, count in Counter(f"{e.data}/{e.split}" for e in experiments).items():
            seeds = max(1, STUDIES[self.study].together // count)
            for start in range(0, self.seeds, seeds):
                some = min(seeds, self.seeds - start)
                batches.append(replace(self, on=on, first=self.first + start, seeds=some))
        return batches


@dataclass(frozen=True)
class StudyRunner:
    """Runs the batches of a study, and adds the outcomes of each to a file as soon as it ends.

    Args:
        command: The beginning of the command line, which the file keeps with each batch.
        path: The file of results.
        engine: The name of the engine.
        data: The folder of the data sets.
        out: A folder for the runs, of which those that are already there are resumed; by default none are written.
        processes: The number of processes that run batches at the same time. With more than one, no seconds per round
            are recorded.
        on_progress: Called after each round of each run; with several processes, once for each run, at its end.
    """

    command: str
    path: Path
    engine: str = "auto"
    data: str | None = None
    out: Path | None = None
    processes: int = 1
    on_progress: OnProgress = ignore_progress

    def run(self, selection: StudySelection) -> float:
        """Run a selection, and return the seconds that its batches took."""
        batches, total = selection.batches(), 0.0
        runner = replace(self, processes=min(self.processes, len(batches)))
        if together := runner.processes > 1:
            runner = replace(runner, on_progress=ignore_progress)
            # The largest first, so that all processes end at about the same time.
            batches.sort(key=lambda batch: len(batch.runs), reverse=True)
        for batch, seconds in results_of(partial(_run_batch, runner), batches, runner.processes):
            total += seconds
            for run in batch.runs if together else ():
                self.on_progress(run, selection.rounds)
        return total


def _run_batch(runner: StudyRunner, batch: StudySelection) -> tuple[StudySelection, float]:
    """Run a batch and add its outcomes to the file; return it with the seconds that it took."""
    study, runs, workers = STUDIES[batch.study], batch.runs, cores_of(runner.processes)
    with choose_engine(runner.engine, workers, cohort=COHORT * len(runs), precision=batch.precision) as engine:
        seconds = run_and_save(
            runner.path,
            runs,
            batch.rounds,
            engine,
            data=runner.data,
            out=runner.out,
            on_round=lambda run, record: runner.on_progress(run, record.round),
            command=f"{runner.command} {batch.options}",
            federation_of=study.federation_of,
            policy=batch.only if study.timed and runner.processes == 1 else "",
        )
    return batch, seconds
