"""Evaluation by client, by level and by class, and after fine-tuning on each client's own data."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Integral
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedcover._threads import one_thread
from fedcover.clients import Client, cohort_of
from fedcover.data import Examples, Population
from fedcover.errors import InputError, check_whole, shown
from fedcover.federation.checkpoint import State
from fedcover.federation.client_states import with_client_states
from fedcover.federation.cohort import needs_classes
from fedcover.federation.complements import evaluated_mask, seen_by, with_complement
from fedcover.federation.evaluate import Score
from fedcover.federation.history import History
from fedcover.federation.planned_round import costs_of_plans, job_of
from fedcover.federation.planning import plan_round
from fedcover.federation.scores import padded_mix
from fedcover.masks.content import content_keys
from fedcover.params import Mask, Params, device_of, on_device
from fedcover.policies.base import ClientPlan, shown_in
from fedcover.seeding import Round
from fedcover.training.complements import seen

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

OWN, MIX, WHOLE = "own test sets", "label mixes", "whole test set"


@dataclass(frozen=True)
class ClientScore:
    """The score of one client's sub-model."""

    client: int
    """The number of the client."""
    level: str
    """Its budget."""
    kept: float
    """Share of the model's entries in its sub-model."""
    examples: int
    """Number of its training examples."""
    loss: float | None
    accuracy: float | None
    """None if the targets are values, not classes."""
    metrics: dict[str, float | None]
    """The task's metrics; on the whole test set if accuracies are by label mix."""
    personalised: float | None = None
    """Accuracy after fine-tuning, or the loss if there is no accuracy; None if not asked for."""


@dataclass(frozen=True)
class LevelScore:
    """The scores of the clients with one budget."""

    level: str
    """The budget."""
    clients: int
    kept: float
    """Share of the model's entries, mean over the clients."""
    accuracy: float | None
    """Mean over the clients."""
    loss: float | None
    """Mean over the clients."""
    personalised: float | None
    """Mean over the clients."""


@dataclass(frozen=True)
class ClientEvaluation:
    """The scores of clients, of levels and of classes after a round."""

    round: int
    tested_on: str
    """``own test sets``, ``label mixes`` (each class counts as in the client's labels) or ``whole test set``."""
    epochs: int
    """Epochs of fine-tuning; 0 for none."""
    clients: list[ClientScore]
    levels: list[LevelScore]
    classes: list[float | None]
    """Accuracy of the global model on each class of the test set; None for a class without examples."""

    def to_json(self) -> str:
        """Return the tables as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def evaluate_clients(
    federation: "Federation",
    model: "History | State",
    evaluate_on: Any,
    personalise: int = 0,
    clients: Sequence[int] | Sequence[str] | None = None,
    all_classes: bool = False,
) -> ClientEvaluation:
    """Evaluate the sub-model of each client, as the next round would plan it.

    Clients with their own test sets are tested on these. Otherwise accuracies on the classes of the test set are
    weighted by the client's label mix, which equals testing on data of that mix. Clients get their budgets in cohorts
    of consecutive clients, so with budgets by slot, client i has the budget of slot i modulo the cohort.

    Args:
        federation: The federation.
        model: The history of a run that has ended, or a state.
        evaluate_on: A test set, as for ``Federation.run``.
        personalise: Epochs of fine-tuning on the client's own examples, inside its mask, before a second evaluation.
        clients: Ids of the clients, or their names if they have some; all by default.
        all_classes: Whether sub-models have the output rows of all classes, also where the policy would leave out those
            of classes that a client does not have, as HeteroFL does.

    Raises:
        InputError: If the history has no state, or there is no client with an id or a name.
    """
    check_whole("personalise", personalise, 0)
    if not isinstance(model, History | State):
        raise InputError(f"model must be the history that run() returned, or a state; got {shown(model)}")
    state = model if isinstance(model, State) else model.state
    if not isinstance(state, State):
        raise InputError("the history has no model: pass the history that run() returned, or a state")
    ids = range(len(federation.clients)) if clients is None else _ids(federation.clients, clients)
    test = federation.test_set(evaluate_on)
    if test is None:
        raise InputError("evaluate_on must be a test set; got None")
    with one_thread(), federation.engine.playing():
        evaluation = _Evaluation(federation, state.on_device(federation.engine.device), test, all_classes)
        return evaluation.result(personalise, ids)


class _Evaluation:
    def __init__(self, federation: "Federation", state: State, test: Examples, all_classes: bool) -> None:
        self._federation, self._state, self._test = federation, state, test
        self._by_classes = needs_classes(federation) and not all_classes
        self._round = Round(state.round + 1, federation.seed)
        population, decision = federation.clients, federation.task.decision
        by_labels = decision is not None and population.shares_labels and test.classes > 0
        self._tested_on = OWN if population.tests is not None else MIX if by_labels else WHOLE

    def result(self, epochs: int, ids: Sequence[int]) -> ClientEvaluation:
        plans = self._plans(ids)
        costs = costs_of_plans(self._federation, self._state.theta, plans, self._round)
        scores = self._scores(plans)
        tuned = self._tuned(plans, epochs) if epochs else [None] * len(plans)
        rows = []
        for plan, cost, score, own in zip(plans, costs, scores, tuned, strict=True):
            client, kept = plan.client, cost.parameters / self._federation.full_cost.parameters
            accuracy, metrics = self._accuracy(client, score), dict(score.metrics)
            values = (_finite(score.loss), accuracy, metrics, own)
            rows.append(ClientScore(client.number, str(client.budget), kept, client.examples, *values))
        theta = self._state.theta
        shown = on_device(shown_in(self._state.policy), device_of(theta))
        whole, _ = self._federation.evaluator.evaluate(theta, self._test, shown)
        classes = [_finite(value) for value in whole.by_class.tolist()]
        return ClientEvaluation(self._state.round, self._tested_on, epochs, rows, _levels(rows), classes)

    def _plans(self, ids: Sequence[int]) -> list[ClientPlan]:
        """Return the plans of clients, in cohorts of consecutive clients, without those that sit out."""
        federation, population = self._federation, self._federation.clients
        plans: list[ClientPlan] = []
        for start in range(0, len(ids), federation.cohort):
            part = list(ids[start : start + federation.cohort])
            sizes, numbers = [population.size(i) for i in part], [population.number_of(i) for i in part]
            cohort = cohort_of(part, sizes, federation.resolved_budgets, federation.by, numbers)
            if self._by_classes:
                cohort = [replace(client, classes=population.classes_of(client.id)) for client in cohort]
            planned, policy_state = plan_round(federation.policy, self._state, cohort, self._round)
            plans += with_client_states(federation, self._state, with_complement(federation, planned, policy_state))
        return plans

    def _scores(self, plans: Sequence[ClientPlan]) -> list[Score]:
        """Return the score of each sub-model; on a shared test set, equal masks are evaluated once."""
        theta = self._state.theta
        if self._tested_on == OWN:
            return [self._score(theta, evaluated_mask(self._federation, p.mask), p.client) for p in plans]
        masks = [evaluated_mask(self._federation, plan.mask) for plan in plans]
        keys = content_keys(masks, theta)
        distinct = dict(zip(keys, zip(masks, plans, strict=True), strict=True))
        scores = {key: self._score(theta, mask, plan.client) for key, (mask, plan) in distinct.items()}
        return [scores[key] for key in keys]

    def _score(self, theta: Params, mask: Mask, client: Client) -> Score:
        tests = self._federation.clients.tests
        test = self._test if tests is None else tests.examples_of(client.id)
        return self._federation.evaluator.evaluate(theta, test, mask)[0]

    def _accuracy(self, client: Client, score: Score) -> float | None:
        """Return the accuracy of a client, by its label mix unless it has its own test set."""
        if self._tested_on != MIX:
            return score.accuracy
        mix: Tensor = padded_mix(self._federation.clients, client.id, len(score.by_class))
        here = (mix > 0) & ~score.by_class.isnan()
        return float((mix[here] * score.by_class[here]).sum() / mix[here].sum()) if bool(here.any()) else None

    def _tuned(self, plans: Sequence[ClientPlan], epochs: int) -> list[float | None]:
        """Return the accuracy, or else the loss, of each client after fine-tuning; None if it diverged."""
        federation = self._federation
        recipe = replace(federation.local.in_round(self._round.index), epochs=epochs, local_steps=None)
        views = seen_by(federation, self._state, plans)
        jobs = [job_of(federation, *planned, recipe, self._round) for planned in zip(plans, views, strict=True)]
        by_id = {job.client.id: job for job in jobs}
        values: dict[int, float | None] = {}
        for update in federation.engine.train(jobs):
            client, view = by_id[update.client].client, by_id[update.client].theta
            mask = evaluated_mask(federation, update.mask)
            theta = dict(update.theta) if mask is update.mask else seen(dict(update.theta), update.mask, view)
            score = self._score(theta, mask, client) if update.is_finite() else None
            accuracy = self._accuracy(client, score) if score else None
            values[client.id] = _finite(score.loss) if score and score.accuracy is None else accuracy
        return [values[plan.client.id] for plan in plans]


def _ids(population: Population, clients: Any) -> list[int]:
    """Return the ids of clients; raise InputError unless they are a list of ids or names of clients."""
    if isinstance(clients, str) or not isinstance(clients, Iterable):
        raise InputError(f"clients must be a list such as [0, 1], or left out for all clients; got {shown(clients)}")
    places = {name: place for place, name in enumerate(population.names)}
    ids: list[int] = []
    for client in clients:
        if isinstance(client, str) and client not in places:
            whose = f"use one of {', '.join(list(places)[:10])}" if places else "the clients have no names; use ids"
            raise InputError(f"there is no client named '{client}'; {whose}")
        if not isinstance(client, str | Integral) or isinstance(client, bool):
            raise InputError(f"clients must be ids or names; got {shown(client)}")
        ids.append(places[client] if isinstance(client, str) else int(client))
    if not ids:
        raise InputError("clients is an empty list; leave it out for all clients")
    return ids


def _levels(rows: Sequence[ClientScore]) -> list[LevelScore]:
    groups: dict[str, list[ClientScore]] = {}
    for row in rows:
        groups.setdefault(row.level, []).append(row)
    return [
        LevelScore(
            level,
            len(group),
            fmean(row.kept for row in group),
            *(_mean([getattr(row, name) for row in group]) for name in ("accuracy", "loss", "personalised")),
        )
        for level, group in groups.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
