"""Cells of the referee: one method in one setting with one seed and one step size, and the federation of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from fedcover.budgets import by_client
from fedcover.data import Population, Split, dirichlet, iid, shards
from fedcover.data.augment import random_crop_flip
from fedcover.data.population import without_small_clients
from fedcover.engines.base import Engine
from fedcover.errors import InputError
from fedcover.federation.federation import Federation
from fedcover.models import build
from fedcover.training.metrics import accuracy
from fedcover.training.task import Task
from fedcover_experiments.referee.budgets import keeps_of
from fedcover_experiments.referee.methods import Method, select_methods
from fedcover_experiments.referee.settings import (
    CLIENTS,
    COHORT,
    HELD_OUT,
    SETTINGS,
    TUNING_SHARE,
    Setting,
    select_settings,
)

CERTIFIED = 0
"""The seed whose run has a certificate; it takes time, and differs little between seeds."""
WHOLE_TEST = "whole test set"
"""The metric that is the accuracy of a client's sub-model on the whole test set."""


@dataclass(frozen=True)
class RefereeCell:
    """One method in one setting with one seed, one step size and a number of rounds."""

    setting: Setting
    method: Method
    seed: int
    lr: float
    rounds: int

    @property
    def name(self) -> str:
        """A unique name, which is also the folder of the run."""
        return f"{self.setting.name}/{self.method.name}/{self.rounds}-rounds/lr-{self.lr:g}/seed-{self.seed}"

    @property
    def tuning(self) -> bool:
        """Whether it only serves to choose the step size."""
        return self.seed == HELD_OUT


@dataclass(frozen=True)
class Selection:
    """The cells that a command asks for."""

    settings: Sequence[Setting]
    methods: Sequence[Method]
    seeds: int | None = None
    """The number of seeds; by default that of each setting's problem."""
    rounds: int | None = None
    """The number of rounds, for reduced runs; by default that of each setting."""

    @classmethod
    def of(cls, settings: str, methods: str, seeds: int, rounds: int) -> "Selection":
        """Return the selection of a command; 0 seeds or rounds are those of each setting."""
        return cls(select_settings(settings), select_methods(methods), seeds or None, rounds or None)

    def rounds_of(self, setting: Setting) -> int:
        """Return the rounds of the cells of a setting."""
        return self.rounds or setting.training.rounds

    def tuning_rounds(self, setting: Setting) -> int:
        """Return the rounds in which the step sizes of a setting are tuned."""
        return max(1, round(TUNING_SHARE * self.rounds_of(setting)))

    def tuning_cells(self) -> list[RefereeCell]:
        """Return the cells of the search for step sizes, without repeats."""
        cells = {}
        for setting in self.settings:
            tuned, rounds = tuned_setting(setting), self.tuning_rounds(setting)
            for method in self.methods:
                for lr in setting.training.lrs:
                    cell = RefereeCell(tuned, method, HELD_OUT, lr, rounds)
                    cells[cell.name] = cell
        return list(cells.values())

    @property
    def total_rounds(self) -> int:
        """The rounds of all cells together."""
        tuning = sum(cell.rounds for cell in self.tuning_cells())
        seeds = sum((self.seeds or setting.problem.seeds) * self.rounds_of(setting) for setting in self.settings)
        return tuning + seeds * len(self.methods)

    @property
    def options(self) -> str:
        """The options of the command that runs this selection."""
        lists = {"methods": ",".join(m.name for m in self.methods), "settings": ",".join(s.name for s in self.settings)}
        numbers = {"seeds": self.seeds, "rounds": self.rounds}
        texts = [f'--{name} "{text}"' for name, text in lists.items()]
        return " ".join([*texts, *(f"--{name} {value}" for name, value in numbers.items() if value)])

    def cells(self, setting: Setting, method: Method, lr: float) -> list[RefereeCell]:
        """Return the cells of a method in a setting, one for each seed."""
        seeds = range(self.seeds or setting.problem.seeds)
        return [RefereeCell(setting, method, seed, lr, self.rounds_of(setting)) for seed in seeds]


def tuned_setting(setting: Setting) -> Setting:
    """Return the setting at which the step sizes of a setting are tuned.

    >>> tuned_setting(SETTINGS["mnist_writers-cnn/natural/nobody-full"]).mix
    '25-25-25-25'
    """
    return SETTINGS[replace(setting, mix=setting.tuned_at, constraint="parameters").name]


def population_of(setting: Setting, split: Split, seed: int) -> Population:
    """Return the clients of a setting, which depend only on the partition and the seed."""
    kind, _, value = setting.partition.partition("-")
    if kind == "natural":
        if split.clients is None:
            raise InputError(f"{setting.problem.data} has no clients of its own; use another partition")
        clients = split.clients
    elif kind == "iid":
        clients = iid(split.train, CLIENTS, seed)
    elif kind == "shards":
        clients = shards(split.train, CLIENTS, int(value), seed)
    else:
        clients = dirichlet(split.train, CLIENTS, float(value), seed, least=2)
    clients = without_small_clients(clients, setting.training.batch_size)
    return clients.augmented(random_crop_flip()) if setting.problem.crop_flip else clients


def federations_of(cells: Sequence[RefereeCell], split: Split, engine: Engine) -> list[Federation]:
    """Return the federations of cells on one data set; clients and initial parameters are shared by seed."""

    @cache
    def task(network: str, seed: int) -> Task:
        model = build(network, split.train.input_shape, split.train.classes, seed)
        return Task(model, metrics={WHOLE_TEST: accuracy})

    @cache
    def clients(setting: Setting, seed: int) -> Population:
        return population_of(setting, split, seed)

    federations = []
    for cell in cells:
        setting, keeps = cell.setting, keeps_of(cell.method, cell.setting)
        shared = tuned_setting(setting)  # all mixes have the same clients
        federations.append(
            Federation(
                task=task(cell.method.network(setting.problem.network), cell.seed),
                clients=clients(shared, cell.seed),
                policy=cell.method.build(setting.widths),
                budgets=by_client([keeps[width] for width in setting.cycle]),
                local=setting.training.recipe(cell.lr, cell.rounds),
                cohort=COHORT,
                seed=cell.seed,
                engine=engine,
                certify=cell.seed == CERTIFIED,
            )
        )
    return federations
