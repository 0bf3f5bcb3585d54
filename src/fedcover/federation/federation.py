"""A federation: a task, its clients, a policy and budgets, and the rounds that it plays (``federation/round.py``)."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import Tensor

from fedcover._threads import one_thread
from fedcover.aggregation.base import Aggregator, ClientUpdate
from fedcover.aggregation.label_weights import label_skew, population_mix
from fedcover.aggregation.mean import mean
from fedcover.aggregation.screening import Screening
from fedcover.budgets import Budgets
from fedcover.data import Examples, Population
from fedcover.engines.base import Engine
from fedcover.engines.serial import Serial
from fedcover.federation import round as walk
from fedcover.federation.advice import remedy
from fedcover.federation.arguments import check_structure, resolve_arguments, test_examples
from fedcover.federation.averaged_round import Arrivals
from fedcover.federation.callbacks.base import Callback
from fedcover.federation.checkpoint import State
from fedcover.federation.cohort import NO_SHARES, Shares, check_cohort, draw_budgets, resolve_budgets
from fedcover.federation.complements import described, resolve_complement
from fedcover.federation.evaluator import Evaluator
from fedcover.federation.fingerprint import describe_method
from fedcover.federation.history import History, RoundRecord
from fedcover.federation.lockstep import follow_rounds, run_all_rounds
from fedcover.federation.planned_round import PlannedRound, RoundHook
from fedcover.federation.runs import ProgressOptions, Run
from fedcover.federation.sampling import Sampling, uniform
from fedcover.federation.scores import Evaluation
from fedcover.federation.screening import check_robustness
from fedcover.masks.cost import cost_of
from fedcover.params import FULL, params_of
from fedcover.policies.base import Policy
from fedcover.policies.fedavg import full
from fedcover.seeding import Round
from fedcover.training.complements import Complement
from fedcover.training.recipes import LocalSGD, Recipe
from fedcover.training.task import Task

CPU = torch.device("cpu")
IID_SKEW = 0.2
"""Certificates treat clients as IID if their labels differ less than this from the population's, beyond chance."""


@dataclass(eq=False, repr=False)
class Federation:
    """Algorithm 1: clients train sub-models of one shared model, which are averaged region by region.

    Args:
        task: The model, whose present parameters are theta_0, and its loss; or only the model, for cross-entropy.
        clients: The population with its training examples, from ``fedcover.data``.
        policy: The policy that plans masks, or its name; full models (FedAvg) by default.
        budgets: What clients can afford, from ``by_slot`` or ``by_client``, or a code; policies that prune need them.
        local: The recipe of local training, or its name.
        cohort: Number of clients in a round.
        seed: Seed of every random draw.
        aggregator: The rule that makes a new model of updates: ``mean()``, ``median()``, ``FedAdam()``, or your own.
        engine: What trains the clients, or its name; ``Serial()`` by default.
        certify: Add a certificate to every record: what the convergence theorem states about the round.
        require_coverage: Raise an error before a round is trained whose masks leave an entry to no client.
        assign: Exchange patterns of equal size within a cohort such that labels of holders complement each other.
        hook: Changes to rounds, for studies of other algorithms.
        sampling: Which clients take part in a round: ``uniform()``, ``weighted()``, ``availability()``, or your own.
        screening: Limits on the influence of a client, by comparison with its cohort; by default none.
        require_robustness: Malicious clients that a robust aggregator must tolerate: entries with too few holders stay.
        complement: What clients see outside their masks, such as ``Frozen()``; by default what the policy needs.

    Raises:
        InputError: If the arguments do not fit together; the message says how to fix them.
    """

    task: Task
    clients: Population
    policy: Policy = field(default_factory=full)
    budgets: Budgets | None = None
    local: Recipe = field(default_factory=LocalSGD)
    cohort: int = 10
    seed: int = 0
    aggregator: Aggregator = field(default_factory=mean)
    engine: Engine = field(default_factory=Serial)
    certify: bool = False
    require_coverage: bool = False
    assign: bool = False
    hook: RoundHook = field(default_factory=RoundHook)
    sampling: Sampling = field(default_factory=uniform)
    screening: Screening | None = None
    require_robustness: int = 0
    complement: Complement = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        resolve_arguments(self)
        check_cohort(self)
        self.complement, rule = resolve_complement(self)
        clients, self.aggregator = self.clients, rule.bind(self.clients)
        check_robustness(self)
        self.task = self.task.predicting(self.policy.traits().prediction).fitted(clients.examples)
        self.structure = self.task.structure(clients.examples.example())
        check_structure(self)
        self.policy = self.policy.bind(self.structure)
        self.aggregator = self.policy.aggregate(self.aggregator)
        self.resolved_budgets = resolve_budgets(self.budgets, self.policy.codebook, self.cohort, len(clients))
        self.theta0, self.full_cost = params_of(self.task.model), cost_of(self.structure, FULL)
        others = {"hook": self.hook, "sampling": self.sampling, "augmentation": clients.examples.augment}
        others |= {"screening": self.screening, "metrics": self.task.named_metrics(), **described(self.complement)}
        self.method = describe_method(self.task, self.policy, self.local, rule, **others)
        self.evaluator = Evaluator(self.task, self.structure, clients.examples)

    @property
    def by(self) -> str:
        """Whether budgets belong to a ``slot`` or to a ``client``."""
        return self.budgets.by if self.budgets else "slot"

    @cached_property
    def label_mix(self) -> Tensor:
        """The fraction of all clients' examples in each class."""
        return population_mix(self.clients)

    @cached_property
    def iid(self) -> bool:
        """Whether certificates treat the clients' data as IID."""
        return self.clients.shares_labels and label_skew(self.clients) < IID_SKEW

    def start(self) -> State:
        """Return the state before the first round."""
        theta = {name: tensor.clone() for name, tensor in self.theta0.items()}
        return State(0, theta, self.policy.start(), server=self.aggregator.initial_state(theta))

    def play_round(self, state: State, test: Examples | None = None, local: bool = False) -> tuple[State, RoundRecord]:
        """Play one round; return the new state and the record, with scores on a test set if there is one."""
        with one_thread(), self.engine.playing():  # one thread makes the record's sums equal on every machine
            planned = self.begin_round(state, self.engine.device)
            arrivals = Arrivals(self.engine.train(planned.jobs), self.engine.together, self.engine.precision)
            return self.end_round(planned, arrivals, test, local)

    def begin_round(
        self, state: State, device: torch.device = CPU, shares: Shares = NO_SHARES, views: bool = True
    ) -> PlannedRound:
        """Draw a cohort and plan its masks; return the round with one job per client, on a device."""
        return walk.begin_round(self, state, device, shares, views)

    def end_round(
        self,
        planned: PlannedRound,
        updates: Arrivals | Iterable[ClientUpdate],
        test: Examples | None = None,
        local: bool = False,
    ) -> tuple[State, RoundRecord]:
        """Aggregate the updates of a planned round; return the state after it, and its record.

        Updates may come in any order, as a stream; ``Arrivals`` adds how they arrived. ``local`` adds local accuracy.

        Raises:
            ClientError: If no client's update is finite.
        """
        arrivals = updates if isinstance(updates, Arrivals) else Arrivals(updates)
        return walk.end_round(self, planned, arrivals, Evaluation(test, local))

    def run(
        self,
        rounds: int,
        evaluate_on: Any = None,
        out: str | os.PathLike[str] | None = None,
        resume: bool = False,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        callbacks: Sequence[Callback] | Callback = (),
        **options: Unpack[ProgressOptions],
    ) -> History:
        """Play rounds from theta_0 and return their history.

        Args:
            rounds: Number of rounds.
            evaluate_on: A test set, as ``as_examples`` takes it; by default the clients' own test sets, if any.
            out: Folder for the run: settings, history, checkpoints and summary.
            resume: Continue the run in ``out``, bit-identical to an uninterrupted run.
            on_round: Called with the record of each round.
            callbacks: Objects that see every round and may stop the run, such as ``fedcover.EarlyStopping()``.
            options: ``progress=True``, to print a line every few seconds, and those of ``RunSchedule``.

        Raises:
            InputError: If the folder cannot be used, or holds another run.
            ClientError: If a client fails, or all clients of a round diverge.
        """
        follow, schedule = follow_rounds(lambda _, record: on_round(record), rounds, options)
        run = Run(self, self.test_set(evaluate_on), partial(follow, 0), out, resume, callbacks=callbacks)
        return run_all_rounds([run], schedule, self.engine)[0]

    def remedy(self, index: int) -> str:
        """Return what to change if the masks of a round leave part of the model to no client."""
        cohort = draw_budgets(self, Round(index, self.seed))
        return remedy(self.policy, cohort, self.resolved_budgets, self.by, self.complement.sees)

    def test_set(self, data: Any) -> Examples | None:
        """Return a test set in the form of the training set; by default the clients' own, None without any."""
        return test_examples(self, data)
