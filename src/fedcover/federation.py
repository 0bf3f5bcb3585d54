"""The walk of a round, and runs of many.

theta -> cohort -> plan (one mask per client) -> audit (coverage, noise) -> jobs -> engine trains -> updates
      -> stream into the region average -> theta' -> evaluate -> record
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from fedcover.aggregate import WEIGHTINGS, RegionSum
from fedcover.budgets import Budget, Budgets
from fedcover.checkpoint import State, digest_of
from fedcover.clients import Client, cohort_of, sample_ids
from fedcover.cost import Cost, cost_of
from fedcover.coverage import coverage_of, gamma_min, pruning_noise, uncovered
from fedcover.data import Examples, Population, as_examples
from fedcover.engines.base import Engine
from fedcover.engines.serial import Serial
from fedcover.errors import InputError
from fedcover.evaluate import evaluate, local_accuracy
from fedcover.history import History, LayerCoverage, RoundRecord
from fedcover.local import Job, LocalSGD, Task
from fedcover.network import trace
from fedcover.params import FULL, Mask, Params, all_finite, check_mask, count, params_of
from fedcover.policies.base import Policy
from fedcover.policies.techniques import full
from fedcover.runs import run_rounds
from fedcover.seeding import Round
from fedcover.settings import Settings


class Federation:
    """Algorithm 1: clients that train sub-models of one shared model, averaged region by region.

    ``budgets`` come from ``by_slot`` or ``by_client``; without them every client can afford the whole
    model. See the README for a script that uses it.
    """

    def __init__(
        self,
        task: Task,
        clients: Population,
        policy: Policy | None = None,
        budgets: Budgets | None = None,
        local: LocalSGD | None = None,
        cohort: int = 10,
        seed: int = 0,
        weighting: str = "uniform",
        engine: Engine | None = None,
    ) -> None:
        self.task, self.clients, self.cohort, self.seed = task, clients, cohort, seed
        self.local, self.engine, self.weighting = local or LocalSGD(), engine or Serial(), weighting
        if weighting not in WEIGHTINGS:
            raise InputError(f"weighting must be one of {', '.join(WEIGHTINGS)}; got '{weighting}'")
        if not 1 <= cohort <= len(clients):
            raise InputError(
                f"a cohort of {cohort} cannot be drawn from {len(clients)} clients; make cohort 1 to {len(clients)}"
            )
        self.network = trace(task.model, clients.examples.inputs[:2])
        self.policy = (policy or full()).bind(self.network)
        self._by = budgets.by if budgets else "slot"
        self._budgets = budgets.resolve(self.policy.codebook) if budgets else (Budget(),) * cohort
        if self._by == "slot" and len(self._budgets) != cohort:
            raise InputError(
                f"the code has {len(self._budgets)} slots but the cohort is {cohort}; make them equal, or use by_client"
            )
        self._theta0 = params_of(task.model)
        self._full = cost_of(self.network, FULL)

    def start(self) -> State:
        """The state before round 1."""
        return State(0, {name: tensor.clone() for name, tensor in self._theta0.items()}, self.policy.start())

    def play_round(self, state: State, test: Examples | None = None, local: bool = False) -> tuple[State, RoundRecord]:
        """One round: the state after it, and its record. ``local`` asks for local accuracy too."""
        clock = _Clock()
        this_round = Round(state.round + 1, self.seed)
        ids = sample_ids(len(self.clients), self.cohort, this_round)
        cohort = cohort_of(ids, [self.clients.size(i) for i in ids], self._budgets, self._by)
        masks, memory = self.policy.plan(state.theta, cohort, this_round, state.policy)
        self._check(masks, state.theta, cohort, this_round)
        noise = pruning_noise(state.theta, masks)
        costs = self._costs(masks)
        clock.lap("plan")

        jobs = [
            Job(client, state.theta, mask, self.clients.examples_of(client.id), self.local, this_round)
            for client, mask in zip(cohort, masks, strict=True)
        ]
        total = RegionSum(state.theta, self.weighting)
        answered: list[Mask] = []
        losses: list[float] = []
        rejected: list[dict[str, Any]] = []
        for update in self.engine.train(self.task, jobs):
            clock.lap("train")
            if all_finite(update.theta):
                total.add(update)
                answered.append(update.mask)
                losses.append(update.train_loss)
            else:
                rejected.append({"client": update.client, "reason": "its trained values are not all finite"})
            clock.lap("aggregate")
        theta = total.mean()
        counts = coverage_of(answered, state.theta)
        clock.lap("aggregate")

        score = evaluate(self.task.model, self.task.loss, theta, test) if test else None
        own = self._local_accuracy(theta, cohort, masks, test) if test and local else None
        clock.lap("evaluate")
        record = RoundRecord(
            round=this_round.index,
            cohort=ids,
            gamma_min=gamma_min(counts),
            uncovered=uncovered(counts),
            pruning_noise=sum(noise) / len(noise),
            pruning_noise_max=max(noise),
            pruning_noises=noise,
            kept=[cost.parameters / self._full.parameters for cost in costs],
            coverage={name: _layer(c) for name, c in counts.items()},
            train_loss=_number(sum(losses) / len(losses)) if losses else None,
            loss=_number(score.loss) if score else None,
            accuracy=score.accuracy if score else None,
            local_accuracy=own,
            bytes_down=sum(cost.bytes_down for cost in costs),
            bytes_up=sum(cost.bytes_up for cost in costs),
            bytes_full=len(cohort) * (self._full.bytes_down + self._full.bytes_up),
            macs=sum(cost.macs for cost in costs) / len(costs),
            macs_full=self._full.macs,
            rejected=rejected,
            seconds=clock.seconds,
        )
        return State(this_round.index, theta, memory), record

    def run(
        self,
        rounds: int,
        evaluate_on: Any = None,
        evaluate_every: int = 1,
        local_every: int = 0,
        out: str | os.PathLike[str] | None = None,
        resume: bool = False,
        checkpoint_every: int = 1,
        settings: Settings | None = None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
    ) -> History:
        """The history of this many rounds from theta_0.

        ``evaluate_on`` is a test set, looked at every ``evaluate_every`` rounds and after the last; local
        accuracy every ``local_every`` rounds (0: only after the last). With ``out`` the run goes into a
        folder, from which ``resume`` continues to the same bits. ``settings`` is what the folder's
        config.toml shows; by default what this federation knows of itself.
        """
        return run_rounds(
            self,
            rounds,
            as_examples(evaluate_on) if evaluate_on is not None else None,
            evaluate_every,
            local_every,
            out,
            resume,
            checkpoint_every,
            settings,
            on_round,
        )

    def describe(self) -> dict[str, Any]:
        """What this federation knows of itself, as settings."""
        return {
            "seed": self.seed,
            "cohort": self.cohort,
            "weighting": self.weighting,
            "engine": self.engine.name,
            "data": {"name": self.clients.examples.name, "clients": len(self.clients)},
            "model": {"name": type(self.task.model).__name__},
            "policy": {"name": str(getattr(self.policy, "name", self.policy))},
            "budgets": {"by": self._by, "items": [str(budget) for budget in self._budgets]},
            "local": asdict(self.local),
        }

    def digests(self) -> list[str]:
        """Digests of theta_0 and of who has which labels: what decides a run beside its settings."""
        sizes = torch.tensor([self.clients.size(i) for i in range(len(self.clients))])
        return [digest_of(self._theta0), digest_of({"labels": self.clients.examples.labels, "sizes": sizes})]

    def _check(self, masks: Sequence[Mask], theta: Params, cohort: Sequence[Client], this_round: Round) -> None:
        if len(masks) != len(cohort):
            raise InputError(
                f"policy {self.policy} returned {len(masks)} masks for a cohort of {len(cohort)}; return one each"
            )
        seen: set[int] = set()
        for mask, client in zip(masks, cohort, strict=True):
            if id(mask) not in seen:
                whose = f"the mask of policy {self.policy} for client {client.id} in round {this_round.index}"
                check_mask(mask, theta, whose)
                if count(theta, mask) == 0:
                    raise InputError(f"{whose} keeps nothing; keep at least one entry")
                seen.add(id(mask))

    def _costs(self, masks: Sequence[Mask]) -> list[Cost]:
        known = {id(FULL): self._full}
        for mask in masks:
            if id(mask) not in known:
                known[id(mask)] = cost_of(self.network, mask)
        return [known[id(mask)] for mask in masks]

    def _local_accuracy(self, theta: Params, cohort: Sequence[Client], masks: Sequence[Mask], test: Examples) -> float:
        mixes = [self.clients.label_mix(client.id) for client in cohort]
        sizes = [client.examples for client in cohort]
        return local_accuracy(self.task.model, self.task.loss, theta, masks, mixes, sizes, test)


class _Clock:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds = {"plan": 0.0, "train": 0.0, "aggregate": 0.0, "evaluate": 0.0}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Count the time since the last lap towards a stage."""
        now = time.perf_counter()
        self.seconds[stage] += now - self._last
        self._last = now


def _layer(counts: torch.Tensor) -> LayerCoverage:
    return LayerCoverage(int(counts.min()), float(counts.double().mean()), float((counts == 0).double().mean()))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
