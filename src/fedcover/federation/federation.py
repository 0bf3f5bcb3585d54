"""The walk of a round, and runs of many.

theta -> cohort -> plan (one mask per client) -> audit (coverage, noise) -> jobs -> engine trains -> updates
      -> stream into the region average -> theta' -> evaluate -> record
"""

import math
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fedcover._threads import one_thread
from fedcover.aggregation.label_weights import assign_patterns, chance, label_skew, population_mix, region_weights
from fedcover.aggregation.region_mean import ClientUpdate, check_weighting, step_towards
from fedcover.aggregation.robust import check_average, region_total
from fedcover.budgets import Budget, Budgets
from fedcover.clients import Client, cohort_of, places, sample_ids
from fedcover.data import Examples, Population, as_examples
from fedcover.engines.base import Engine
from fedcover.engines.serial import Serial
from fedcover.errors import ClientError, InputError, check_whole
from fedcover.federation.advice import remedy
from fedcover.federation.checkpoint import State
from fedcover.federation.evaluate import Score, evaluate, local_accuracy
from fedcover.federation.feedback import FeedbackSum
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.planning import observe_round, plan_round
from fedcover.federation.round import Clock, PlannedRound, make_record
from fedcover.federation.runs import Run, Schedule, run_all_rounds
from fedcover.masks.cost import Cost, cost_of, costs_of, with_extras
from fedcover.masks.coverage import coverage_of, norm_and_noise
from fedcover.params import FULL, Mask, Params, device_of, on_device, params_of, prune
from fedcover.policies.base import Policy, shown_in
from fedcover.policies.fedavg import full
from fedcover.seeding import Round
from fedcover.structure.batch_norm import check_batches, has_statistics, spread_over
from fedcover.structure.trace import carries, trace
from fedcover.theory import RunCertifier, Steps, check_coverage, measure
from fedcover.toml import Settings
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from fedcover.training.task import LocalSGD, Task

CPU = torch.device("cpu")
START_EXAMPLES = 2000
"""Training examples on which a certificate's loss at the start is measured."""
IID_SKEW = 0.2
"""Clients whose labels differ less than this from the population's, beyond chance, count as IID in certificates."""


class Federation:
    """Algorithm 1: clients that train sub-models of one shared model, averaged region by region.

    ``budgets`` come from ``by_slot`` or ``by_client``; without them every client can afford the whole
    model. ``weighting`` says what a client counts for in a region: all alike (``uniform``), as its
    ``examples``, or so that the ``labels`` of the region's clients together come nearest to the population's.
    With ``certify`` every record has a certificate: what the convergence theorem says of the round. With
    ``require_coverage`` a round whose masks, planned for its cohort, leave an entry to nobody is an error before it is
    trained; where budgets belong to clients, that may come after rounds that were covered. With
    ``assign`` patterns of equal size go to the clients of a cohort that complement each other's labels. The ``average``
    of a region is the ``mean``, or the ``median``, or ``trimmed`` at both ends: a few liars move these little.
    See the README for a script that uses it.
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
        certify: bool = False,
        require_coverage: bool = False,
        assign: bool = False,
        average: str = "mean",
        trim: float = 0.2,
    ) -> None:
        self.clients, self.cohort, self.seed = clients, cohort, seed
        self.local, self.engine, self.weighting = local or LocalSGD(), engine or Serial(), weighting
        check_weighting(weighting)
        check_average(average, trim, weighting)
        self.average, self.trim = average, trim
        self._labels = population_mix(clients) if weighting == "labels" or assign else None
        self.certify, self.require_coverage, self.assign = certify, require_coverage, assign
        self._iid = certify and clients.tells_labels and label_skew(clients) < IID_SKEW
        check_whole("cohort", cohort, 1)
        if cohort > len(clients):
            raise InputError(
                f"a cohort of {cohort} cannot be drawn from {len(clients)} clients; make cohort 1 to {len(clients)}"
            )
        self.task = task.static(clients.examples.inputs[:2])
        self.structure = trace(self.task.model, clients.examples.inputs[:2])
        sizes = {clients.number_of(client): clients.size(client) for client in range(len(clients))}
        check_batches(self.structure, sizes, self.local.batch_size)
        if self.structure.uncounted:
            names = ", ".join(self.structure.uncounted)
            warnings.warn(f"multiply-adds of {names} cannot be counted and are left out of MACs", stacklevel=2)
        self.policy = (policy or full()).bind(self.structure)
        self.by = budgets.by if budgets else "slot"
        self.budgets = budgets.resolve(self.policy.codebook) if budgets else (Budget(),) * cohort
        if self.by == "slot" and len(self.budgets) != cohort:
            raise InputError(
                f"the code has {len(self.budgets)} slots but the cohort is {cohort}; make them equal, or use by_client"
            )
        if len(self.budgets) > len(clients):
            raise InputError(f"there are {len(self.budgets)} budgets for {len(clients)} clients; give at most one each")
        self.theta0 = params_of(self.task.model)
        self._full = cost_of(self.structure, FULL)
        self._norm_inputs: Tensor | None = None

    def start(self) -> State:
        """The state before round 1."""
        return State(0, {name: tensor.clone() for name, tensor in self.theta0.items()}, self.policy.start())

    def play_round(self, state: State, test: Examples | None = None, local: bool = False) -> tuple[State, RoundRecord]:
        """One round: the state after it, and its record. ``local`` asks for local accuracy too."""
        with one_thread(), self.engine.playing():  # one thread: the record's sums are then the same on every machine
            begun = self.begin_round(state, self.engine.device)
            return self.end_round(begun, self.engine.train(begun.jobs), test, local, self.engine.together)

    def begin_round(self, state: State, device: torch.device = CPU) -> PlannedRound:
        """The first half of a round: a cohort, its masks, and a job for each client, on a device."""
        clock = Clock()
        state = replace(state, theta=on_device(state.theta, device), theory=on_device(state.theory, device))
        this_round = Round(state.round + 1, self.seed)
        ids = sample_ids(len(self.clients), self.cohort, this_round)
        sizes, names = [self.clients.size(i) for i in ids], [self.clients.number_of(i) for i in ids]
        cohort = self._assigned(cohort_of(ids, sizes, self.budgets, self.by, names))
        if self.policy.wants_classes:
            cohort = [replace(client, classes=self.clients.classes_of(client.id)) for client in cohort]
        cohort, masks, training_options, memory = plan_round(self.policy, state, cohort, this_round)
        if self.require_coverage:
            check_coverage(coverage_of(masks, state.theta), this_round.index, self.remedy)
        norm2, noise = norm_and_noise(state.theta, masks)
        costs = self._costs(state.theta, masks, cohort, training_options, this_round)
        jobs = [
            Job(self.task, self.clients, client, state.theta, mask, self.local, this_round, options)
            for client, mask, options in zip(cohort, masks, training_options, strict=True)
        ]
        clock.lap("plan")
        return PlannedRound(this_round, state, cohort, masks, memory, norm2, noise, costs, jobs, clock)

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
        """The second half: updates stream into the region average, then the new theta is looked at.

        Clients that sent none are ``left_out``, each as {"client": name, "reason": text}; coverage is by those who did.
        ``wire`` is noted in the record.
        """
        this_round, state, cohort, clock = begun.this_round, begun.state, begun.cohort, begun.clock
        clock.skip()
        total = region_total(self.average, self.trim, state.theta, self.weighting)
        certifier = RunCertifier(state.theta, state.theory, self.local.epochs, self._iid) if self.certify else None
        answers, place = FeedbackSum(state.theta, begun.masks), places(cohort) if certifier else {}
        answered: list[Mask] = []
        sizes: set[int] = set()
        waiting: list[ClientUpdate] = []
        losses: list[float] = []
        rejected = list(left_out)
        label_bias: dict[str, float] | None = None
        stream = iter(updates)
        while group := list(islice(stream, together)):
            clock.lap("train")
            finite = [update.is_finite() for update in group]
            sound = [update for update, fine in zip(group, finite, strict=True) if fine]
            if self.weighting == "labels":
                waiting += sound  # what each counts for depends on all who answer
            elif sound:
                total.add_together(sound)
            for update in sound:
                answers.add(update)
                if certifier:
                    certifier.add(update, self._steps(update.examples), place[update.client])
                    answered.append(update.mask)
                    sizes.add(update.examples)
            losses += [update.train_loss for update in sound]
            rejected += [
                {"client": self.clients.number_of(update.client), "reason": "its trained values are not all finite"}
                for update, fine in zip(group, finite, strict=True)
                if not fine
            ]
            clock.lap("aggregate")
        if not answers.clients:
            raise ClientError(
                f"every client of round {this_round.index} diverged: no trained values are finite;"
                f" lower lr (now {self.local.lr}) and start anew"
            )
        if waiting:
            weighted, label_bias = self._weighted(state.theta, waiting)
            total.add_together(weighted)
        step = self.policy.server_step(this_round)
        theta = step_towards(state.theta, total.mean(), step)
        feedback = answers.feedback()
        counts = feedback.counts
        memory = observe_round(self.policy, theta, feedback, this_round, begun.memory)
        certificate, theory = None, state.theory
        if certifier:
            facts = measure(state.theta, answered, this_round.index, count_regions=not self._iid)
            beyond = {
                "weighting": self.weighting == "labels" or (self.weighting == "examples" and len(sizes) > 1),
                "server_step": step != 1.0,
                "average": self.average != "mean",
                "training_options": any(job.options and not job.options.plain for job in begun.jobs),
            }
            why = [name for name, so in beyond.items() if so]
            certificate, theory = certifier.close(facts, counts, theta, self._start_loss(state), why, self.remedy)
        clock.lap("aggregate")

        shown = on_device(shown_in(memory), device_of(theta))
        score = self._score(prune(theta, shown) if shown else theta, test) if test else None
        looks = test and local and self.clients.tells_labels
        own = self._local_accuracy(theta, cohort, begun.masks, test) if test and looks else None
        clock.lap("evaluate")
        record = make_record(
            this_round, cohort, counts, begun.noise, begun.costs, self._full, losses, score, own, rejected,
            clock.seconds, begun.norm2, certificate, label_bias, wire,
        )  # fmt: skip
        return State(this_round.index, theta, memory, theory), record

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
        schedule = Schedule(rounds, evaluate_every, local_every, checkpoint_every)
        test = self.test_set(evaluate_on) if evaluate_on is not None else None
        run = Run(self, test, on_round, out, resume, settings)
        return run_all_rounds([run], schedule, self.engine)[0]

    def remedy(self, index: int) -> str:
        """What to do about masks that leave part of the model to nobody in this round."""
        ids = sample_ids(len(self.clients), self.cohort, Round(index, self.seed))
        cohort = cohort_of(ids, [1] * len(ids), self.budgets, self.by)
        return remedy(self.policy, [client.budget for client in cohort], self.budgets, self.by)

    def test_set(self, given: Any) -> Examples:
        """The test set, with at least as many classes as the training set."""
        test = as_examples(given)
        return replace(test, classes=max(test.classes, self.clients.examples.classes))

    def _assigned(self, cohort: list[Client]) -> list[Client]:
        """The cohort, with patterns of equal size exchanged if that is asked for."""
        if self._labels is None or not self.assign:
            return cohort
        mixes = torch.stack([self.clients.label_mix(client.id) for client in cohort])
        places = assign_patterns([client.budget for client in cohort], mixes, self._labels)
        return [replace(client, budget=cohort[place].budget) for client, place in zip(cohort, places, strict=True)]

    def _weighted(self, theta: Params, updates: Sequence[ClientUpdate]) -> tuple[list[ClientUpdate], dict[str, float]]:
        """The updates with what their entries count for by labels, as if only these clients were in the round.

        And what is left of the labels' bias.
        """
        assert self._labels is not None
        mixes = torch.stack([self.clients.label_mix(update.client) for update in updates])
        ridge = chance(self._labels, sum(self.clients.size(update.client) for update in updates) / len(updates))
        balance = region_weights([update.mask for update in updates], theta, mixes, self._labels, ridge)
        weighted = [replace(update, weights=own) for update, own in zip(updates, balance.clients, strict=True)]
        return weighted, balance.bias()

    def _start_loss(self, state: State) -> float:
        """The loss on training examples before the first round; not asked for later."""
        if state.round:
            return math.nan
        some = self.clients.examples
        few = replace(some, inputs=some.inputs[:START_EXAMPLES], labels=some.labels[:START_EXAMPLES])
        return self._score(state.theta, few).loss

    def _score(self, theta: Params, test: Examples) -> Score:
        """The score of a whole model on a test set."""
        return evaluate(self.task.model, self.task.loss, theta, test, self._norms_from(theta))

    def _norms_from(self, theta: Params) -> Tensor | None:
        """Clients' inputs, where theta is, over which batch norms gather statistics; None if there are no such."""
        if not has_statistics(self.task.model):
            return None
        device = device_of(theta)
        if self._norm_inputs is None or self._norm_inputs.device != device:
            self._norm_inputs = spread_over(self.clients.examples.inputs).to(device)
        return self._norm_inputs

    def _steps(self, examples: int) -> Steps:
        return Steps(self.local.steps(examples), self.local.lr, self.local.momentum)

    def _costs(
        self,
        theta: Params,
        masks: Sequence[Mask],
        cohort: Sequence[Client],
        training_options: Sequence[TrainingOptions | None],
        this_round: Round,
    ) -> list[Cost]:
        distinct = {id(mask): (mask, client) for mask, client in zip(masks, cohort, strict=True)}
        known = dict(zip(distinct, costs_of(self.structure, [mask for mask, _ in distinct.values()]), strict=True))
        for key, (mask, client) in distinct.items():
            whose = f"the mask of policy {self.policy} for client {client.number} in round {this_round.index}"
            if known[key].parameters == 0:
                raise InputError(f"{whose} keeps nothing; keep at least one entry")
            if (gone := known[key].emptied) and not carries(self.structure, prune(theta, mask)):
                raise InputError(
                    f"{whose} keeps nothing of '{gone[0]}', so that no input reaches the output; raise the budget"
                    f" '{client.budget}', or keep at least one entry of each layer in the policy"
                )
        return [
            with_extras(known[id(mask)], self._full, bool(options.report), options.regrow is not None)
            if options
            else known[id(mask)]
            for mask, options in zip(masks, training_options, strict=True)
        ]

    def _local_accuracy(
        self, theta: Params, cohort: Sequence[Client], masks: Sequence[Mask], test: Examples
    ) -> float | None:
        mixes = [self.clients.label_mix(client.id) for client in cohort]
        sizes = [client.examples for client in cohort]
        norms = self._norms_from(theta)
        return local_accuracy(self.task.model, self.task.loss, theta, masks, mixes, sizes, test, norms)
