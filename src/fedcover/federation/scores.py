"""What evaluation adds to a record: the scores of a federation's models on a test set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedcover.data import Examples, Population
from fedcover.federation.checkpoint import State
from fedcover.federation.complements import evaluated_mask
from fedcover.federation.evaluate import Score
from fedcover.federation.evaluate_together import EvaluationRequest, evaluate_together
from fedcover.federation.evaluator import LocalTest
from fedcover.params import Params, device_of, on_device
from fedcover.policies.base import ClientPlan, shown_in
from fedcover.seeding import seeded

if TYPE_CHECKING:
    from fedcover.federation.federation import Federation

START_EXAMPLES = 2000
"""Number of training examples on which certificates measure the initial loss."""


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated after a round."""

    test: Examples | None = None
    """The test set; None if the round is not evaluated."""
    local: bool = False
    """Whether to measure local accuracy also."""


def score_fields(
    federation: "Federation", state: State, plans: Sequence[ClientPlan], evaluation: Evaluation
) -> dict[str, Any]:
    """Return the fields of the record that show the scores of a state; None where nothing is measured."""
    if evaluation.test is None:
        return {"loss": None, "accuracy": None, "local_accuracy": None, "metrics": {}}
    request = _request(federation, state, plans, evaluation)
    score, local = federation.evaluator.evaluate(state.theta, evaluation.test, request.shown, request.clients)
    if evaluation.local and federation.clients.tests is not None:
        local = _on_own_tests(federation, state.theta, plans, federation.clients.tests)
    return _fields(score, local)


def scores_of_many(
    rounds: Sequence[tuple["Federation", State, Sequence[ClientPlan]]], evaluation: Evaluation
) -> list[dict[str, Any]] | None:
    """Return what ``score_fields`` returns for several federations, evaluated at once; None if that cannot be done."""
    test = evaluation.test
    if test is None or (evaluation.local and any(federation.clients.tests for federation, *_ in rounds)):
        return None
    requests = [_request(*one, evaluation) for one in rounds]
    results = evaluate_together(requests, test.on_device(device_of(rounds[0][1].theta)))
    return None if results is None else [_fields(score, local) for score, local in results]


def _request(
    federation: "Federation", state: State, plans: Sequence[ClientPlan], evaluation: Evaluation
) -> EvaluationRequest:
    """Return the models of a federation that are evaluated after a round."""
    test, clients = evaluation.test, federation.clients
    assert test is not None
    shown = on_device(shown_in(state.policy), device_of(state.theta))
    by_labels = clients.tests is None and clients.shares_labels and test.classes > 0
    tests = [
        LocalTest(mask, padded_mix(clients, plan.client.id, test.classes), plan.client.examples)
        for plan, mask in ((plan, evaluated_mask(federation, plan.mask)) for plan in plans)
        if evaluation.local and by_labels and federation.task.decision is not None
    ]
    return EvaluationRequest(federation.evaluator, state.theta, shown, tests)


def _fields(score: Score, local: float | None) -> dict[str, Any]:
    """Return the fields of a record."""
    loss = score.loss if math.isfinite(score.loss) else None
    return {"loss": loss, "accuracy": score.accuracy, "local_accuracy": local, "metrics": dict(score.metrics)}


def padded_mix(clients: Population, client: int, classes: int) -> Tensor:
    """Return a client's share of each class, with 0 for classes that only the test set has."""
    mix = clients.label_mix(client)
    return torch.cat([mix, mix.new_zeros(max(0, classes - len(mix)))])


def _on_own_tests(
    federation: "Federation", theta: Params, plans: Sequence[ClientPlan], tests: Population
) -> float | None:
    """Return the accuracy of the clients' sub-models on their own test sets, weighted by the sizes of these."""
    total, examples = 0.0, 0
    for plan in plans:
        mask = evaluated_mask(federation, plan.mask)
        accuracy = federation.evaluator.accuracy_of(theta, mask, tests.examples_of(plan.client.id))
        if accuracy is not None:
            total += accuracy * tests.size(plan.client.id)
            examples += tests.size(plan.client.id)
    return total / examples if examples else None


def initial_loss(federation: "Federation", theta: Params) -> float:
    """Return the loss on some training examples."""
    train = federation.clients.examples
    with seeded(0, "initial loss"):
        first = train.subset(range(min(START_EXAMPLES, len(train))))
    return federation.evaluator.score(theta, first).loss
