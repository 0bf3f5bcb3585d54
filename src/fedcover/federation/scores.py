"""What evaluation adds to a record: the scores of a federation's models on a test set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedcover.data import Examples
from fedcover.federation.checkpoint import State
from fedcover.federation.evaluator import LocalTest
from fedcover.params import Params, device_of, on_device
from fedcover.policies.base import ClientPlan, shown_in

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
    test, clients = evaluation.test, federation.clients
    if test is None:
        return {"loss": None, "accuracy": None, "local_accuracy": None}
    shown = on_device(shown_in(state.policy), device_of(state.theta))
    tests = [
        LocalTest(plan.mask, clients.label_mix(plan.client.id), plan.client.examples)
        for plan in plans
        if evaluation.local and clients.shares_labels
    ]
    score, local = federation.evaluator.evaluate(state.theta, test, shown, tests)
    loss = score.loss if math.isfinite(score.loss) else None
    return {"loss": loss, "accuracy": score.accuracy, "local_accuracy": local}


def initial_loss(federation: "Federation", theta: Params) -> float:
    """Return the loss on some training examples."""
    train = federation.clients.examples
    first = replace(train, inputs=train.inputs[:START_EXAMPLES], labels=train.labels[:START_EXAMPLES])
    return federation.evaluator.score(theta, first).loss
