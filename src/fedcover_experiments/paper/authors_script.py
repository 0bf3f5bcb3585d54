"""What the authors' released script for weights pruning computes instead of Algorithm 1.

A study of its own: four departures as switches, and the published weights-pruning column with each of them on,
with none, and with all. Quarantined: nothing imports this module but the command that runs the study.

rank      The output of one argsort, of the signed weights, is used as if it were ranks: the mask has nothing to do
          with magnitude.
start     Policies 6 and 7 begin local training from policy 5's pruned model.
gradient  Local gradients are not masked: pruned weights train, and are zeroed afterwards.
leak      Codes run one after another. In a code's first round its pruned models begin from the theta with which the
          code before it began its last round, under that round's masks; full models begin from theta_0.

All of it is read off the authors' repository, whose address is in the paper: the script for weights pruning that leaves
biases alone, its list of codes, and its tables of losses.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedcover.aggregation.region_mean import ClientUpdate
from fedcover.budgets import QUARTERS
from fedcover.clients import Client
from fedcover.data import Examples, load
from fedcover.engines.base import Engine
from fedcover.federation.checkpoint import State
from fedcover.federation.federation import CPU, Federation
from fedcover.federation.history import RoundRecord
from fedcover.federation.round import PlannedRound
from fedcover.federation.runs import run_many
from fedcover.params import FULL, Mask, Params, on_device, prune
from fedcover.policies.ranked import Ranked, Ranks
from fedcover.policies.weight_pruning import weight_pruning
from fedcover.training.client import Job
from fedcover_experiments.results import Outcome, how_made, outcome_of, save
from fedcover_experiments.runner import SPLITS, Experiment, ExperimentRun, settings_of

SWITCHES = ("rank", "start", "gradient", "leak")
VARIANTS = {"none": frozenset[str](), **{name: frozenset({name}) for name in SWITCHES}, "all": frozenset(SWITCHES)}
"""The columns of the study."""
CHAIN = (
    "1111111111", "1111114444", "1111144447", "1111223344", "1111234444", "1111444477",
    "1111234567", "1111556677", "1114556677", "1234556677", "1455666777", "2233445677",
)  # fmt: skip
"""The codes in the order in which the script ran them, by its list and the first losses of its curves."""
ALONE = ("1111444444", "1444777777")
"""Codes whose first losses show that each was run in a process of its own."""


def technique(variant: str) -> str:
    """How outcomes name a variant.

    >>> technique("rank")
    'WP+rank'
    """
    return f"WP+{variant}"


@dataclass(frozen=True)
class Misranked(Ranked):
    """Weights pruning that takes the order of the weights for their ranks."""

    def ranks(self, theta: Params) -> Ranks:
        """For place j the index of the j-th smallest weight, counted from the end, as if it were weight j's rank."""
        flat = {block.name: theta[block.name].flatten() for block in self.blocks}
        return {name: len(values) - 1 - values.argsort(stable=True) for name, values in flat.items()}


class Released(Federation):
    """Algorithm 1 with some of the departures; ``before`` is what leaks from the code before."""

    def __init__(self, on: frozenset[str], before: Params | None = None, **settings: Any) -> None:
        pruning = weight_pruning()
        policy = Misranked(pruning.name, pruning.find) if "rank" in on else pruning
        super().__init__(policy=policy, **settings)
        self._on, self._before = on, before
        self.begun_from: Params = {}
        """The theta with which the latest round began."""

    def begin_round(self, state: State, device: torch.device = CPU) -> PlannedRound:
        """A round whose clients start, and are masked, as the script does it."""
        self.begun_from = state.theta
        leaked = self._before if state.round == 0 else None
        planned = begun = super().begin_round(replace(state, theta=leaked) if leaked else state, device)
        if leaked:
            own = on_device(state.theta, device)
            jobs = [job if job.mask else replace(job, theta=own) for job in planned.jobs]
            begun = replace(planned, state=replace(planned.state, theta=own), jobs=jobs)
        if self._on & {"start", "gradient"}:
            begun = replace(begun, jobs=self._restarted(begun.jobs, planned))
        return begun

    def _restarted(self, jobs: Sequence[Job], planned: PlannedRound) -> list[Job]:
        """The jobs from the pruned models that the script begins with; clients with one start share it."""
        source, starts = planned.state.theta, dict[int, tuple[Mask, Params]]()
        fifth = self._fifth(planned) if "start" in self._on else FULL
        made = []
        for job in jobs:
            if not job.mask:
                made.append(job)
                continue
            mask = fifth if "start" in self._on and job.client.budget.name in ("6", "7") else job.mask
            if id(mask) not in starts:
                starts[id(mask)] = (mask, prune(source, mask))
            made.append(replace(job, theta=starts[id(mask)][1], mask=FULL if "gradient" in self._on else job.mask))
        return made

    def _fifth(self, planned: PlannedRound) -> Mask:
        """Policy 5's mask in this round, whether or not a client has it."""
        client = Client(0, 0, QUARTERS["5"])
        return self.policy.plan(planned.state.theta, [client], planned.this_round, planned.policy_state)[0][0]

    def end_round(
        self,
        begun: PlannedRound,
        updates: Iterable[ClientUpdate],
        test: Examples | None = None,
        local: bool = False,
        together: int = 1,
        left_out: Sequence[dict[str, Any]] = (),
        wire: dict[str, Any] | None = None,
    ) -> tuple[State, RoundRecord]:
        """The round's end; what was trained outside its mask is zeroed first."""
        if "gradient" in self._on:
            updates = (
                replace(update, theta=prune(update.theta, mask), mask=mask)
                for mask, update in zip(begun.masks, updates, strict=True)
            )
        return super().end_round(begun, updates, test, local, together, left_out, wire)


def study(
    path: Path,
    seeds: int,
    rounds: int,
    engine: Engine,
    data: str | Path | None = None,
    on_round: Callable[[ExperimentRun, RoundRecord], None] = lambda run, record: None,
    command: str = "",
) -> float:
    """Run all variants of the weights-pruning column, IID and non-IID, and write their outcomes; the seconds it took.

    Where nothing leaks all codes are one batch; where something does each code waits for the one before it.
    """
    split = load("mnist", data)
    outcomes: dict[ExperimentRun, Outcome] = {}

    def play(runs: Sequence[ExperimentRun], before: Sequence[Params | None]) -> list[Params]:
        made = [
            Released(_switches(run), leaked, **settings)
            for run, leaked, settings in zip(runs, before, settings_of(runs, split), strict=True)
        ]
        histories = run_many(
            made, rounds, split.test, engine=engine, on_round=lambda number, record: on_round(runs[number], record)
        )
        outcomes.update((run, outcome_of(run, history)) for run, history in zip(runs, histories, strict=True))
        return [federation.begun_from for federation in made]

    began = time.perf_counter()
    clean = [name for name, on in VARIANTS.items() if "leak" not in on]
    leaky = [name for name, on in VARIANTS.items() if "leak" in on]
    with engine:
        first = [*_runs(clean, (*CHAIN, *ALONE), seeds), *_runs(leaky, ALONE, seeds)]
        play(first, [None] * len(first))
        before: Sequence[Params | None] = [None] * len(_runs(leaky, CHAIN[:1], seeds))
        for code in CHAIN:
            before = play(_runs(leaky, (code,), seeds), before)
    seconds = round(time.perf_counter() - began, 1)
    came_from = {"mnist": split.train.provenance}
    save(path, outcomes, rounds, how_made(command, len(outcomes), seconds, engine, came_from))
    return seconds


def runs_of(seeds: int) -> list[ExperimentRun]:
    """All runs of the study."""
    return _runs(list(VARIANTS), (*CHAIN, *ALONE), seeds)


def _runs(variants: Sequence[str], codes: Sequence[str], seeds: int) -> list[ExperimentRun]:
    return [
        ExperimentRun(Experiment("mnist", split, technique(variant), code), seed)
        for variant in variants
        for split in SPLITS["mnist"]
        for code in codes
        for seed in range(seeds)
    ]


def _switches(run: ExperimentRun) -> frozenset[str]:
    return VARIANTS[run.experiment.technique.partition("+")[2]]
