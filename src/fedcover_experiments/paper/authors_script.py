"""What the authors' released script for weight pruning computes instead of Algorithm 1.

The script departs from Algorithm 1 in four ways. This study runs the published column of weight pruning without
departures, with each of them, and with all four. Only the commands that run the study import this module.

rank      The output of one argsort of the signed weights is used as ranks: the mask does not depend on magnitude.
start     Clients with patterns 6 and 7 start local training from the pruned model of pattern 5.
gradient  Local gradients are not masked: pruned weights are trained, and set to zero afterwards.
leak      Codes run one after another. In a code's first round its pruned models start from the theta with which the
          previous code started its last round, under that round's masks; full models start from theta_0.

The departures were read from the authors' repository, whose address is in the paper: the script for weight pruning that
does not prune biases, its list of codes, and its tables of losses.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedcover.aggregation import ClientUpdate
from fedcover.budgets import QUARTERS
from fedcover.clients import Client
from fedcover.data import load
from fedcover.engines.base import Engine
from fedcover.federation.checkpoint import State
from fedcover.federation.federation import Federation
from fedcover.federation.lockstep import run_many
from fedcover.federation.planned_round import PlannedRound, RoundHook
from fedcover.federation.planning import plan_round
from fedcover.params import FULL, Mask, Params, device_of, on_device, prune
from fedcover.policies.base import Policy
from fedcover.policies.ranked import Ranked, Ranks
from fedcover.policies.weight_pruning import weight_pruning
from fedcover.training.client import Job
from fedcover_experiments.results import Outcome, outcome_of, provenance_of, save
from fedcover_experiments.runner import SPLITS, Experiment, ExperimentRun, OnRound, ignore_round, settings_of

SWITCHES = ("rank", "start", "gradient", "leak")
VARIANTS = {"none": frozenset[str](), **{name: frozenset({name}) for name in SWITCHES}, "all": frozenset(SWITCHES)}
"""The columns of the study: the departures of each variant."""
CHAIN = (
    "1111111111", "1111114444", "1111144447", "1111223344", "1111234444", "1111444477",
    "1111234567", "1111556677", "1114556677", "1234556677", "1455666777", "2233445677",
)  # fmt: skip
"""The codes in the order in which the script ran them, from its list and the first losses of its curves."""
SEPARATE = ("1111444444", "1444777777")
"""Codes whose first losses show that each was run in a process of its own."""


def policy_name(variant: str) -> str:
    """Return the policy's name in the outcomes of a variant.

    >>> policy_name("rank")
    'WP+rank'
    """
    return f"WP+{variant}"


@dataclass(frozen=True)
class Misranked(Ranked):
    """Weight pruning that takes the sorting order of the weights for their ranks."""

    def ranks(self, theta: Params) -> Ranks:
        """Return, for position j, the index of the j-th smallest weight counted from the end, as weight j's rank."""
        flat = {block.name: theta[block.name].flatten() for block in self.blocks}
        return {name: len(values) - 1 - values.argsort(stable=True) for name, values in flat.items()}


class ScriptHook(RoundHook):
    """The departures: how weights are ranked (``policy``), and how a round's clients start and are masked.

    Args:
        switches: The departures that are on.
        leaked: The theta that leaks from the previous code, if any.
    """

    def __init__(self, switches: frozenset[str], leaked: Params | None = None) -> None:
        self._switches, self._leaked = switches, leaked
        self.round_theta: Params = {}
        """The theta with which the latest round started."""

    @property
    def policy(self) -> Policy:
        """Weight pruning, as the script ranks weights."""
        pruning = weight_pruning()
        return Misranked(pruning.name, pruning.find) if "rank" in self._switches else pruning

    def begun(self, state: State) -> State:
        """Return the state with the leaked theta, before the first round."""
        self.round_theta = state.theta
        return replace(state, theta=self._leaked) if self._leaked and state.round == 0 else state

    def planned(self, federation: Federation, planned: PlannedRound) -> PlannedRound:
        """Return a round whose clients start, and are masked, as in the script."""
        departed = planned
        if self._leaked and planned.state.round == 0:
            theta = on_device(self.round_theta, device_of(planned.state.theta))
            jobs = [job if job.mask else replace(job, theta=theta) for job in planned.jobs]
            departed = replace(planned, state=replace(planned.state, theta=theta), jobs=jobs)
        if self._switches & {"start", "gradient"}:
            departed = replace(departed, jobs=self._restarted(federation, departed.jobs, planned))
        return departed

    def updates(self, planned: PlannedRound, updates: Iterable[ClientUpdate]) -> Iterable[ClientUpdate]:
        """Yield the updates; weights that were trained outside their mask are first set to zero."""
        masks = {plan.client.id: plan.mask for plan in planned.plans}
        for update in updates:
            mask = masks[update.client]
            yield (
                replace(update, theta=prune(update.theta, mask), mask=mask) if "gradient" in self._switches else update
            )

    def _restarted(self, federation: Federation, jobs: Sequence[Job], planned: PlannedRound) -> list[Job]:
        """Return the jobs with the pruned models from which the script starts; equal starts are shared."""
        source, starts = planned.state.theta, dict[int, tuple[Mask, Params]]()
        fifth = _fifth(federation, planned) if "start" in self._switches else FULL
        restarted = []
        for job in jobs:
            if not job.mask:
                restarted.append(job)
                continue
            mask = fifth if "start" in self._switches and job.client.budget.name in ("6", "7") else job.mask
            if id(mask) not in starts:
                starts[id(mask)] = (mask, prune(source, mask))
            train_mask = FULL if "gradient" in self._switches else job.mask
            restarted.append(replace(job, theta=starts[id(mask)][1], mask=train_mask))
        return restarted


def _fifth(federation: Federation, planned: PlannedRound) -> Mask:
    """Return the mask of pattern 5 in this round, whether or not a client has it."""
    client = Client(0, 0, QUARTERS["5"])
    plans, _ = plan_round(federation.policy, planned.state, [client], planned.this_round)
    return plans[0].mask


def run_departures(
    path: Path,
    seeds: int,
    rounds: int,
    engine: Engine,
    data: str | Path | None = None,
    on_round: OnRound = ignore_round,
    command: str = "",
) -> float:
    """Run all variants of the column of weight pruning, IID and non-IID, and return the seconds that it took.

    Without leaks all codes are one batch; with leaks each code waits for the previous one.

    Args:
        path: The file to which outcomes are added.
        seeds: The number of seeds, from 0.
        rounds: Rounds of each run.
        engine: The engine that trains all runs.
        data: The folder of MNIST; by default FEDCOVER_DATA or the cache.
        on_round: Called after every round of every run.
        command: The command line, which the file keeps with the outcomes.
    """
    split = load("mnist", data)
    outcomes: dict[ExperimentRun, Outcome] = {}

    def play(runs: Sequence[ExperimentRun], leaks: Sequence[Params | None]) -> list[Params]:
        hooks = [ScriptHook(_switches(run), leaked) for run, leaked in zip(runs, leaks, strict=True)]
        federations = [
            Federation(policy=hook.policy, hook=hook, **settings)
            for hook, settings in zip(hooks, settings_of(runs, split), strict=True)
        ]
        histories = run_many(
            federations, rounds, split.test, engine=engine,
            on_round=lambda number, record: on_round(runs[number], record),
        )  # fmt: skip
        ended = zip(runs, histories, strict=True)
        outcomes.update((run, outcome_of(run, history, rounds, split.train.classes)) for run, history in ended)
        return [hook.round_theta for hook in hooks]

    start = time.perf_counter()
    clean = [name for name, switches in VARIANTS.items() if "leak" not in switches]
    leaky = [name for name, switches in VARIANTS.items() if "leak" in switches]
    with engine:
        first = [*_runs(clean, (*CHAIN, *SEPARATE), seeds), *_runs(leaky, SEPARATE, seeds)]
        play(first, [None] * len(first))
        leaks: Sequence[Params | None] = [None] * len(_runs(leaky, CHAIN[:1], seeds))
        for code in CHAIN:
            leaks = play(_runs(leaky, (code,), seeds), leaks)
    seconds = round(time.perf_counter() - start, 1)
    entry = provenance_of(command, len(outcomes), seconds, engine, {"mnist": split.train.provenance})
    save(path, outcomes, rounds, entry)
    return seconds


def departure_runs(seeds: int) -> list[ExperimentRun]:
    """Return all runs of the study."""
    return _runs(list(VARIANTS), (*CHAIN, *SEPARATE), seeds)


def _runs(variants: Sequence[str], codes: Sequence[str], seeds: int) -> list[ExperimentRun]:
    return [
        ExperimentRun(Experiment("mnist", split, policy_name(variant), code), seed)
        for variant in variants
        for split in SPLITS["mnist"]
        for code in codes
        for seed in range(seeds)
    ]


def _switches(run: ExperimentRun) -> frozenset[str]:
    return VARIANTS[run.experiment.policy.partition("+")[2]]
