"""A federation: a task, its clients, a policy and budgets, and the rounds that it plays.

theta -> cohort -> plan (a mask per client) -> jobs -> engine trains -> updates
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

from fedcover._threads import one_thread
from fedcover.aggregation.label_weights import assign_patterns, chance, label_skew, population_mix, region_weights
from fedcover.aggregation.region_mean import NOT_FINITE, ClientUpdate, check_weighting, step_towards
from fedcover.aggregation.robust import check_average, region_total
from fedcover.budgets import Budget, Budgets
from fedcover.clients import Client, cohort_of, places, sample_ids
from fedcover.data import Examples, Population, as_examples
from fedcover.engines.base import Engine
from fedcover.engines.serial import Serial
from fedcover.errors import ClientError, InputError, check_whole
from fedcover.federation.advice import remedy
from fedcover.federation.checkpoint import State
from fedcover.federation.evaluator import Evaluator, LocalTest, Progress
from fedcover.federation.feedback import FeedbackSum
from fedcover.federation.fingerprint import describe_method
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
from fedcover.structure.batch_norm import check_batches
from fedcover.structure.trace import carries, trace
from fedcover.theory import RunCertifier, Steps, check_coverage, measure
from fedcover.toml import Settings
from fedcover.training.client import Job
from fedcover.training.options import TrainingOptions
from fedcover.training.task import LocalSGD, Task

CPU = torch.device("cpu")
START_EXAMPLES = 2000
"""Number of training examples on which certificates measure the initial loss."""
IID_SKEW = 0.2
"""Certificates treat clients as IID if their labels differ less than this from the population's, beyond chance."""


class Federation:
    """Algorithm 1: clients train sub-models of one shared model, which are averaged region by region.

    Args:
        task: The model, whose present parameters are theta_0, and its loss.
        clients: The population with its training examples, from ``fedcover.data``.
        policy: The policy that plans masks; full models (FedAvg) by default.
        budgets: What clients can afford, from ``by_slot`` or ``by_client``; the whole model by default.
        local: The recipe of local training.
        cohort: Number of clients in a round.
        seed: Seed of every random draw.
        weighting: Weight of a client in a region: ``uniform``; ``examples``, by its number of examples; or ``labels``,
            such that the mixed labels of the region's clients come as close as possible to the population's.
        engine: What trains the clients; ``Serial()`` by default.
        certify: Add a certificate to every record: what the convergence theorem states about the round.
        require_coverage: Raise an error before a round is trained whose masks leave an entry to no client. If budgets
            belong to clients, this may happen after rounds that were covered.
        assign: Exchange patterns of equal size within a cohort such that labels of holders complement each other.
        average: How a region is averaged: ``mean``, ``median``, or ``trimmed``; the last two are robust to a few
            malicious clients.
        trim: With ``trimmed``, the share of a region's clients that is cut off at each end.

    Raises:
        InputError: If the arguments do not fit together; the message says how to fix them.

    Example:
        ``examples/01_your_own.py`` is a complete script.
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
        self._iid = certify and clients.shares_labels and label_skew(clients) < IID_SKEW
        check_whole("cohort", cohort, 1)
        if cohort > len(clients):
            raise InputError(f"cohort must be from 1 to the number of clients, {len(clients)}; got {cohort}")
        self.task = task.static(clients.examples.inputs[:2])
        self.structure = trace(self.task.model, clients.examples.inputs[:2])
        sizes = {clients.number_of(client): clients.size(client) for client in range(len(clients))}
        check_batches(self.structure, sizes, self.local.batch_size)
        if self.structure.uncounted:
            names = ", ".join(self.structure.uncounted)
            warnings.warn(f"the multiply-adds of {names} cannot be counted and are not part of MACs", stacklevel=2)
        self.policy = (policy or full()).bind(self.structure)
        self.by = budgets.by if budgets else "slot"
        self.budgets = budgets.resolve(self.policy.codebook) if budgets else (Budget(),) * cohort
        if self.by == "slot" and len(self.budgets) != cohort:
            raise InputError(
                f"the code has {len(self.budgets)} slots but cohort is {cohort}; make them equal, or use by_client"
            )
        if len(self.budgets) > len(clients):
            raise InputError(f"there are {len(self.budgets)} budgets for {len(clients)} clients; give at most one each")
        self.theta0 = params_of(self.task.model)
        self._full = cost_of(self.structure, FULL)
        self.method = describe_method(self.task, self.policy, self.local)
        self.evaluator = Evaluator(self.task, self.structure, clients.examples.inputs)

    def start(self) -> State:
        """Return the state before the first round."""
        return State(0, {name: tensor.clone() for name, tensor in self.theta0.items()}, self.policy.start())

    def play_round(self, state: State, test: Examples | None = None, local: bool = False) -> tuple[State, RoundRecord]:
        """Play one round.

        Args:
            state: The state before the round.
            test: A test set on which to evaluate the new model.
            local: Also measure local accuracy.

        Returns:
            The state after the round, and its record.
        """
        with one_thread(), self.engine.playing():  # one thread makes the record's sums equal on every machine
            planned = self.begin_round(state, self.engine.device)
            return self.end_round(planned, self.engine.train(planned.jobs), test, local, self.engine.together)

    def begin_round(self, state: State, device: torch.device = CPU) -> PlannedRound:
        """Draw a cohort and plan its masks; return the round with one job per client, on a device."""
        clock = Clock()
        state = replace(state, theta=on_device(state.theta, device), theory=on_device(state.theory, device))
        this_round = Round(state.round + 1, self.seed)
        ids = sample_ids(len(self.clients), self.cohort, this_round)
        sizes, numbers = [self.clients.size(i) for i in ids], [self.clients.number_of(i) for i in ids]
        cohort = self._assigned(cohort_of(ids, sizes, self.budgets, self.by, numbers))
        if self.policy.wants_classes:
            cohort = [replace(client, classes=self.clients.classes_of(client.id)) for client in cohort]
        cohort, masks, training_options, policy_state = plan_round(self.policy, state, cohort, this_round)
        if self.require_coverage:
            check_coverage(coverage_of(masks, state.theta), this_round.index, self.remedy)
        norm2, noise = norm_and_noise(state.theta, masks)
        costs = self._costs(state.theta, masks, cohort, training_options, this_round)
        jobs = [
            Job(self.task, self.clients, client, state.theta, mask, self.local, this_round, options)
            for client, mask, options in zip(cohort, masks, training_options, strict=True)
        ]
        clock.lap("plan")
        return PlannedRound(this_round, state, cohort, masks, policy_state, norm2, noise, costs, jobs, clock)

    def end_round(
        self,
        planned: PlannedRound,
        updates: Iterable[ClientUpdate],
        test: Examples | None = None,
        local: bool = False,
        together: int = 1,
        left_out: Sequence[dict[str, Any]] = (),
        wire: dict[str, Any] | None = None,
    ) -> tuple[State, RoundRecord]:
        """Average the updates of a planned round, and evaluate and record it.

        Args:
            planned: The round, from ``begin_round``.
            updates: The updates of its clients, in any order; consumed as a stream.
            test: A test set on which to evaluate the new model.
            local: Also measure local accuracy.
            together: Number of updates that are added to the average at once.
            left_out: Clients without an update, each as {"client": number, "reason": text}.
            wire: Bytes sent and received, for the record.

        Returns:
            The state after the round, and its record.

        Raises:
            ClientError: If no client's update is finite.
        """
        this_round, state, cohort, clock = planned.this_round, planned.state, planned.cohort, planned.clock
        clock.skip()
        total = region_total(self.average, self.trim, state.theta, self.weighting)
        certifier = RunCertifier(state.theta, state.theory, self.local.epochs, self._iid) if self.certify else None
        feedback_sum, place = FeedbackSum(state.theta, planned.masks), places(cohort) if certifier else {}
        masks: list[Mask] = []
        sizes: set[int] = set()
        waiting: list[ClientUpdate] = []
        losses: list[float] = []
        rejected = list(left_out)
        label_bias: dict[str, float] | None = None
        stream = iter(updates)
        while group := list(islice(stream, together)):
            clock.lap("train")
            finite = [update.is_finite() for update in group]
            accepted = [update for update, fine in zip(group, finite, strict=True) if fine]
            if self.weighting == "labels":
                waiting += accepted  # the weight of each depends on all updates
            elif accepted:
                total.add_together(accepted)
            for update in accepted:
                feedback_sum.add(update)
                if certifier:
                    certifier.add(update, self._steps(update.examples), place[update.client])
                    masks.append(update.mask)
                    sizes.add(update.examples)
            losses += [update.train_loss for update in accepted]
            rejected += [
                {"client": self.clients.number_of(update.client), "reason": NOT_FINITE}
                for update, fine in zip(group, finite, strict=True)
                if not fine
            ]
            clock.lap("aggregate")
        if not feedback_sum.clients:
            raise ClientError(
                f"every client of round {this_round.index} diverged: no trained values are finite;"
                f" lower lr (now {self.local.lr}) and start again"
            )
        if waiting:
            weighted, label_bias = self._weighted(state.theta, waiting)
            total.add_together(weighted)
        step = self.policy.server_step(this_round)
        theta = step_towards(state.theta, total.mean(), step)
        feedback = feedback_sum.feedback()
        counts = feedback.counts
        policy_state = observe_round(self.policy, theta, feedback, this_round, planned.policy_state)
        certificate, theory = None, state.theory
        if certifier:
            facts = measure(state.theta, masks, this_round.index, count_regions=not self._iid)
            beyond = {
                "weighting": self.weighting == "labels" or (self.weighting == "examples" and len(sizes) > 1),
                "server_step": step != 1.0,
                "average": self.average != "mean",
                "training_options": any(job.options and not job.options.plain for job in planned.jobs),
            }
            why = [reason for reason, applies in beyond.items() if applies]
            certificate, theory = certifier.close(facts, counts, theta, self._start_loss(state), why, self.remedy)
        clock.lap("aggregate")

        shown = on_device(shown_in(policy_state), device_of(theta))
        score, local_accuracy = None, None
        if test:
            clients = self._local_tests(planned) if local and self.clients.shares_labels else []
            score, local_accuracy = self.evaluator.evaluate(theta, test, shown, clients)
        clock.lap("evaluate")
        record = make_record(
            this_round, cohort, counts, planned.noise, planned.costs, self._full, losses, score, local_accuracy,
            rejected, clock.seconds, planned.norm2, certificate, label_bias, wire,
        )  # fmt: skip
        return State(this_round.index, theta, policy_state, theory), record

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
        on_evaluate: Progress = lambda done, total: None,
    ) -> History:
        """Play rounds from theta_0 and return their history.

        Args:
            rounds: Number of rounds.
            evaluate_on: A test set: ``Examples``, a pair of arrays, or a torch ``Dataset``.
            evaluate_every: Rounds between evaluations; the last round is always evaluated.
            local_every: Rounds between measurements of local accuracy; 0 for only after the last round.
            out: Folder for the run: settings, history, checkpoints and summary.
            resume: Continue the run in ``out``, bit-identical to an uninterrupted run.
            checkpoint_every: Rounds between checkpoints.
            settings: What config.toml in the folder shows; by default the federation's own description.
            on_round: Called with the record of each round.
            on_evaluate: Called while a round is evaluated, with the number of examples so far and their total.

        Raises:
            InputError: If the folder cannot be used, or holds another run.
            ClientError: If a client fails, or all clients of a round diverge.
        """
        schedule = Schedule(rounds, evaluate_every, local_every, checkpoint_every)
        test = self.test_set(evaluate_on) if evaluate_on is not None else None
        run = Run(self, test, on_round, out, resume, settings)
        self.evaluator.on_progress = on_evaluate
        return run_all_rounds([run], schedule, self.engine)[0]

    def remedy(self, index: int) -> str:
        """Return what to change if the masks of a round leave part of the model to no client."""
        ids = sample_ids(len(self.clients), self.cohort, Round(index, self.seed))
        cohort = cohort_of(ids, [1] * len(ids), self.budgets, self.by)
        return remedy(self.policy, [client.budget for client in cohort], self.budgets, self.by)

    def test_set(self, data: Any) -> Examples:
        """Return the test set, with at least as many classes as the training set."""
        test = as_examples(data)
        return replace(test, classes=max(test.classes, self.clients.examples.classes))

    def _assigned(self, cohort: list[Client]) -> list[Client]:
        """Return the cohort, with patterns of equal size exchanged if ``assign`` is set."""
        if self._labels is None or not self.assign:
            return cohort
        mixes = torch.stack([self.clients.label_mix(client.id) for client in cohort])
        order = assign_patterns([client.budget for client in cohort], mixes, self._labels)
        return [replace(client, budget=cohort[place].budget) for client, place in zip(cohort, order, strict=True)]

    def _weighted(self, theta: Params, updates: Sequence[ClientUpdate]) -> tuple[list[ClientUpdate], dict[str, float]]:
        """Return the updates with weights by labels, as if only these clients were in the round.

        Also return the remaining bias of the labels.
        """
        assert self._labels is not None
        mixes = torch.stack([self.clients.label_mix(update.client) for update in updates])
        ridge = chance(self._labels, sum(self.clients.size(update.client) for update in updates) / len(updates))
        balance = region_weights([update.mask for update in updates], theta, mixes, self._labels, ridge)
        weighted = [replace(update, weights=w) for update, w in zip(updates, balance.clients, strict=True)]
        return weighted, balance.bias()

    def _start_loss(self, state: State) -> float:
        """Return the loss on training examples before the first round; NaN later."""
        if state.round:
            return math.nan
        train = self.clients.examples
        first = replace(train, inputs=train.inputs[:START_EXAMPLES], labels=train.labels[:START_EXAMPLES])
        return self.evaluator.score(state.theta, first).loss

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
        costs = costs_of(self.structure, [mask for mask, _ in distinct.values()])
        cost_of_mask = dict(zip(distinct, costs, strict=True))
        for key, (mask, client) in distinct.items():
            whose = f"the mask of policy {self.policy} for client {client.number} in round {this_round.index}"
            if cost_of_mask[key].parameters == 0:
                raise InputError(f"{whose} keeps nothing; keep at least one entry")
            if (empty := cost_of_mask[key].emptied) and not carries(self.structure, prune(theta, mask)):
                raise InputError(
                    f"{whose} keeps nothing of '{empty[0]}', so no input reaches the output; raise the budget"
                    f" '{client.budget}', or keep at least one entry of each layer in the policy"
                )
        return [
            with_extras(cost_of_mask[id(mask)], self._full, bool(options.report), options.regrow is not None)
            if options
            else cost_of_mask[id(mask)]
            for mask, options in zip(masks, training_options, strict=True)
        ]

    def _local_tests(self, planned: PlannedRound) -> list[LocalTest]:
        """Return the part of each client of a round in local accuracy."""
        return [
            LocalTest(mask, self.clients.label_mix(client.id), client.examples)
            for client, mask in zip(planned.cohort, planned.masks, strict=True)
        ]
