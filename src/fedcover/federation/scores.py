"""What evaluation adds to a record: the scores of a federation's models on a test set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fedcover.data import Examples, Population
from fedcover.federation.checkpoint import State
from fedcover.federation.evaluate import Score, evaluate, local_accuracy
from fedcover.params import Params, device_of, on_device, prune
from fedcover.policies.base import ClientPlan, shown_in
from fedcover.structure.batch_norm import has_statistics, spread_over
from fedcover.training.task import Task

START_EXAMPLES = 2000
"""Number of training examples on which certificates measure the initial loss."""


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated after a round."""

    test: Examples | None = None
    """The test set; None if the round is not evaluated."""
    local: bool = False
    """Whether to measure local accuracy also."""


@dataclass
class Evaluator:
    """Evaluates the models of one federation."""

    task: Task
    clients: Population
    _norm_inputs: Tensor | None = field(default=None, init=False)

    def fields(self, state: State, plans: Sequence[ClientPlan], evaluation: Evaluation) -> dict[str, Any]:
        """Return the fields of the record that show the scores of a state; None where nothing is measured."""
        test, theta = evaluation.test, state.theta
        if test is None:
            return {"loss": None, "accuracy": None, "local_accuracy": None}
        shown = on_device(shown_in(state.policy), device_of(theta))
        score = self.score(prune(theta, shown) if shown else theta, test)
        local = self._local_accuracy(theta, plans, test) if evaluation.local and self.clients.shares_labels else None
        loss = score.loss if math.isfinite(score.loss) else None
        return {"loss": loss, "accuracy": score.accuracy, "local_accuracy": local}

    def score(self, theta: Params, test: Examples) -> Score:
        """Return the score of a whole model on a test set."""
        return evaluate(self.task.model, self.task.loss, theta, test, self._norms_from(theta))

    def initial_loss(self, theta: Params) -> float:
        """Return the loss on some training examples."""
        train = self.clients.examples
        first = replace(train, inputs=train.inputs[:START_EXAMPLES], labels=train.labels[:START_EXAMPLES])
        return self.score(theta, first).loss

    def _local_accuracy(self, theta: Params, plans: Sequence[ClientPlan], test: Examples) -> float | None:
        masks = [plan.mask for plan in plans]
        mixes = [self.clients.label_mix(plan.client.id) for plan in plans]
        sizes = [plan.client.examples for plan in plans]
        norms = self._norms_from(theta)
        return local_accuracy(self.task.model, self.task.loss, theta, masks, mixes, sizes, test, norms)

    def _norms_from(self, theta: Params) -> Tensor | None:
        """Return inputs over which batch norms gather statistics, on theta's device; None without batch norms."""
        if not has_statistics(self.task.model):
            return None
        device = device_of(theta)
        if self._norm_inputs is None or self._norm_inputs.device != device:
            self._norm_inputs = spread_over(self.clients.examples.inputs).to(device)
        return self._norm_inputs
