"""Run many experiments, each a federation with one seed, as one batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from fedcover.budgets import by_slot
from fedcover.data import Examples, Population, Split, dirichlet, iid, load, shards
from fedcover.engines.base import Engine
from fedcover.errors import DivergedError
from fedcover.federation.federation import Federation
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.lockstep import run_many
from fedcover.models import INPUT_SHAPES, build
from fedcover.policies.registry import named_policy
from fedcover.training.recipes import LocalSGD
from fedcover.training.task import Task

CLIENTS, COHORT, ROUNDS, SEEDS = 100, 10, 100, 3
FULL, LARGE, MEDIUM, SMALL = "1111111111", "1111114444", "1111444444", "1444777777"
"""Full models, and the usual codes of the paper's levels L, M and S."""
STAR_MEDIUM, STAR_SMALL = "1111223344", "1234556677"
"""The codes of levels M and S with a higher coverage."""
MODELS = {"mnist": "mlp", "cifar10": "lenet"}
"""The paper's model for each data set."""
DATA = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
"""The titles of the data sets."""
SPLIT_TITLES = {"iid": "IID", "non-iid": "non-IID", "dirichlet": "Dirichlet 0.3"}
"""The titles of ways to split a data set: at random, two shards of labels per client, shares drawn for each class."""
SPLITS = {"mnist": ("iid", "non-iid"), "cifar10": ("iid",)}
"""The ways in which the paper splits each data set among the clients."""
CHECKPOINT_EVERY = 25


@dataclass(frozen=True)
class Experiment:
    """A federation to be run for several seeds: data set, split, policy and code of budgets."""

    data: str
    split: str
    policy: str
    code: str

    @property
    def name(self) -> str:
        """A unique name, such as ``mnist/iid/WP-1111223344``."""
        return f"{self.data}/{self.split}/{self.policy}-{self.code}"

    @property
    def data_title(self) -> str:
        """The data set and its split as reports show them, such as ``MNIST IID``."""
        return f"{DATA[self.data]} {SPLIT_TITLES[self.split]}"

    @property
    def departs(self) -> bool:
        """True if it departs from Algorithm 1, as the variants of the authors' script do."""
        return "+" in self.policy


@dataclass(frozen=True)
class ExperimentRun:
    """One experiment with one seed."""

    experiment: Experiment
    seed: int

    @property
    def name(self) -> str:
        """A unique name, such as ``mnist/iid/WP-1111223344/seed-0``."""
        return f"{self.experiment.name}/seed-{self.seed}"


FederationFactory = Callable[[ExperimentRun, dict[str, Any]], Federation]
"""A function that builds the federation of a run from all its settings but the policy."""
OnRound = Callable[[ExperimentRun, RoundRecord], None]
"""A callback that receives the record of every round."""
OnProgress = Callable[[Any, int], None]
"""A callback that receives a run, or a cell of the referee, and the index of the last round that it has ended."""


def by_policy(run: ExperimentRun, settings: dict[str, Any]) -> Federation:
    """Return the paper's federation of a run, with the policy that the experiment names."""
    return Federation(policy=named_policy(run.experiment.policy), **settings)


def ignore_round(run: ExperimentRun, record: RoundRecord) -> None:
    """Do nothing with a round's record: the default callback."""


def ignore_progress(run: object, index: int) -> None:
    """Do nothing with the progress of a run: the default callback."""


class Played(NamedTuple):
    """What came of several experiments."""

    histories: dict[ExperimentRun, History]
    """The histories; that of a run whose clients have all diverged has the rounds before."""
    provenance: dict[str, str]
    """The provenance of each data set."""
    classes: dict[str, int]
    """The number of classes of each data set."""


def run_all(
    runs: Sequence[ExperimentRun],
    rounds: int,
    engine: Engine,
    data: str | Path | None = None,
    out: Path | None = None,
    on_round: OnRound = ignore_round,
    federation_of: FederationFactory = by_policy,
) -> Played:
    """Run experiments and return their histories.

    Runs on the same data set advance in lockstep, so that one call of the engine trains the clients of all of them.
    Runs with the same seed start from the same model and the same split, as in the paper. If all clients of a run
    diverge, only that run ends; in its first round, all end with an error.

    Args:
        runs: The runs, on one data set or several.
        rounds: Rounds of each run.
        engine: The engine that trains all runs.
        data: The folder of the data sets; by default FEDCOVER_DATA or the cache.
        out: A folder for one run folder per run; runs that are already there are resumed. By default none are written.
        on_round: Called after every round of every run.
        federation_of: Builds the federation of a run; by default the paper's.
    """
    histories: dict[ExperimentRun, History] = {}
    provenance, classes = dict[str, str](), dict[str, int]()
    for name in dict.fromkeys(run.experiment.data for run in runs):
        batch = [run for run in runs if run.experiment.data == name]
        split = load(name, data)
        provenance[name], classes[name] = split.train.provenance, split.train.classes
        federations = [
            federation_of(run, settings) for run, settings in zip(batch, settings_of(batch, split), strict=True)
        ]
        played = run_batch(
            [run.name for run in batch],
            federations,
            rounds,
            split.test,
            engine,
            out,
            lambda number, record, batch=batch: on_round(batch[number], record),  # type: ignore[misc]
            on_failure=partial(_end_only_if_diverged, batch),
        )
        histories |= zip(batch, played, strict=True)
    return Played(histories, provenance, classes)


def _end_only_if_diverged(runs: Sequence[ExperimentRun], number: int, error: Exception) -> None:
    """Let the other runs continue if clients have diverged after the first round, which is an outcome; else raise."""
    if not isinstance(error, DivergedError):
        raise error
    if error.round == 1:
        raise DivergedError(f"{runs[number].name}: {error}", error.round) from error


def run_batch(
    names: Sequence[str],
    federations: Sequence[Federation],
    rounds: int,
    test: Examples,
    engine: Engine,
    out: Path | None = None,
    on_round: Callable[[int, RoundRecord], None] = lambda number, record: None,
    evaluate_every: int = 1,
    on_failure: Callable[[int, Exception], None] | None = None,
) -> list[History]:
    """Run federations in lockstep and return their histories, see ``fedcover.run_many``.

    With ``out``, a folder for one run folder per name, runs that are already there are resumed.
    """
    return run_many(
        federations,
        rounds,
        test,
        out=None if out is None else [out / name for name in names],
        resume=out is not None,
        checkpoint_every=CHECKPOINT_EVERY,
        evaluate_every=evaluate_every,
        engine=engine,
        on_round=on_round,
        on_failure=on_failure,
    )


def settings_of(runs: Sequence[ExperimentRun], split: Split) -> list[dict[str, Any]]:
    """Return the settings of the paper's federations, without the policy, for runs on one data set."""
    model = MODELS[runs[0].experiment.data]

    @cache
    def task(seed: int) -> Task:
        return Task(build(model, INPUT_SHAPES[model], split.train.classes, seed))

    @cache
    def clients(partition: str, seed: int) -> Population:
        return _clients(split.train, partition, seed)

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


def _clients(train: Examples, partition: str, seed: int) -> Population:
    if partition == "dirichlet":
        return dirichlet(train, CLIENTS, 0.3, seed)
    return iid(train, CLIENTS, seed) if partition == "iid" else shards(train, CLIENTS, 2, seed)
