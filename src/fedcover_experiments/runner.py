"""Run many experiments, each a federation with one seed, as one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedcover.budgets import by_slot
from fedcover.data import Examples, Population, Split, iid, load, shards
from fedcover.engines.base import Engine
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.runs import run_many
from fedcover.models import INPUT_SHAPES, build
from fedcover.policies.registry import named_policy
from fedcover.training.task import LocalSGD, Task

CLIENTS, COHORT, ROUNDS, SEEDS = 100, 10, 100, 3
FULL, LARGE, MEDIUM, SMALL = "1111111111", "1111114444", "1111444444", "1444777777"
"""Full models, and the paper's levels L, M and S by the usual codes."""
STAR_MEDIUM, STAR_SMALL = "1111223344", "1234556677"
"""Levels M and S by the codes of higher coverage."""
MODELS = {"mnist": "mlp", "cifar10": "lenet"}
"""The paper's network for each data set."""
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
"""What the data sets are called."""
SPLITS = {"mnist": ("iid", "non-iid"), "cifar10": ("iid",)}
"""How the paper splits each data set among the clients."""
CHECKPOINT_EVERY = 25


@dataclass(frozen=True)
class Experiment:
    """One federation of the paper, to be run for several seeds."""

    data: str
    split: str
    technique: str
    code: str

    @property
    def name(self) -> str:
        """Such as ``mnist/iid/WP-1111223344``."""
        return f"{self.data}/{self.split}/{self.technique}-{self.code}"

    @property
    def place(self) -> str:
        """Such as ``MNIST IID``."""
        return f"{DATA[self.data]} {'IID' if self.split == 'iid' else 'non-IID'}"

    @property
    def departs(self) -> bool:
        """Whether it departs from Algorithm 1, as some do in the study of the authors' script."""
        return "+" in self.technique


@dataclass(frozen=True)
class ExperimentRun:
    """One experiment with one seed."""

    experiment: Experiment
    seed: int

    @property
    def name(self) -> str:
        """Such as ``mnist/iid/WP-1111223344/seed-0``."""
        return f"{self.experiment.name}/seed-{self.seed}"


Make = Callable[[ExperimentRun, dict[str, Any]], Federation]
"""What makes the federation of a run, given all but its policy."""


def by_technique(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """The paper's federation of a run: the policy that its technique names."""
    return Federation(policy=named_policy(run.experiment.technique), **settings)


def run_all(
    runs: Sequence[ExperimentRun],
    rounds: int,
    engine: Engine,
    data: str | Path | None = None,
    out: Path | None = None,
    on_round: Callable[[ExperimentRun, RoundRecord], None] = lambda run, record: None,
    federation_of: Make | None = None,
) -> tuple[dict[ExperimentRun, History], dict[str, str]]:
    """The histories of many runs, and where each data set came from; runs on the same data go in lockstep.

    ``federation_of`` makes a run's federation, by default one of the paper's. With ``out`` there is one folder for
    each, and what is there is taken up again. Runs of one seed start from the same model and the same split, as in
    the paper.
    """
    histories: dict[ExperimentRun, History] = {}
    came_from: dict[str, str] = {}
    for name in dict.fromkeys(run.experiment.data for run in runs):
        some = [run for run in runs if run.experiment.data == name]
        split = load(name, data)
        came_from[name] = split.train.provenance
        make = federation_of or by_technique
        made = [make(run, settings) for run, settings in zip(some, settings_of(some, split), strict=True)]
        histories |= zip(
            some,
            run_many(
                made,
                rounds,
                split.test,
                out=None if out is None else [out / run.name for run in some],
                resume=out is not None,
                checkpoint_every=CHECKPOINT_EVERY,
                engine=engine,
                on_round=lambda number, record, some=some: on_round(some[number], record),  # type: ignore[misc]
            ),
            strict=True,
        )
    return histories, came_from


def settings_of(runs: Sequence[ExperimentRun], split: Split) -> list[dict[str, Any]]:
    """What the paper's federations are made of, for runs on one data set; all but the policy."""
    data = runs[0].experiment.data
    model = MODELS[data]

    @cache
    def task(seed: int) -> Task:
        return Task(build(model, INPUT_SHAPES[model], split.train.classes, seed))

    @cache
    def clients(how: str, seed: int) -> Population:
        return _clients(split.train, how, seed)

    return [
        {
            "task": task(run.seed),
            "clients": clients(run.experiment.split, run.seed),
            "budgets": by_slot(run.experiment.code),
            "local": LocalSGD(),
            "cohort": COHORT,
            "seed": run.seed,
        }
        for run in runs
    ]


def _clients(train: Examples, how: str, seed: int) -> Population:
    return iid(train, CLIENTS, seed) if how == "iid" else shards(train, CLIENTS, 2, seed)
