"""The task: a model, its loss and its metrics."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.data import Examples
from fedcover.data.inputs import Inputs, copy_of, count, join
from fedcover.errors import InputError
from fedcover.seeding import ambient, seeded
from fedcover.structure.batch_norm import static_form
from fedcover.structure.calls import call_model
from fedcover.structure.state import check_stateless
from fedcover.structure.trace import trace
from fedcover.training.metrics import Metric, default_metrics, named_metrics
from fedcover.training.targets import Decision, Loss, decision_of, fit_loss

LOOKED_AT = 64
"""The number of items of a lazy data set whose targets are looked at."""


@dataclass(frozen=True)
class Task:
    """A model to train, its loss and its metrics.

    Args:
        model: The model. Its current parameters are theta_0. Parameters that do not require gradients stay as they
            are. It returns its scores as a tensor, as the first element of a tuple, or as ``logits``.
        loss: A function from (scores, labels) to the mean loss over the batch.
        metrics: Functions from (scores, labels) of the whole test set to a number, or names of
            ``fedcover.training.metrics``: one, a sequence, or a dict by name. By default accuracy for class numbers,
            F1 also for several labels, and RMSE for values.
        decision: What scores predict; None for values. ``fitted`` sets it.

    Raises:
        InputError: If no parameter of the model requires gradients.

    >>> Task(nn.Linear(4, 2)).loss.__name__
    'cross_entropy'
    """

    model: nn.Module
    loss: Loss = F.cross_entropy
    metrics: "Sequence[Metric | str] | Mapping[str, Metric | str] | Metric | str | None" = None
    decision: Decision | None = field(default_factory=Decision, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module; got {type(self.model).__name__}")
        if not callable(self.loss):
            raise InputError(f"loss must be a function (scores, labels) -> mean loss; got {self.loss!r}")
        if not any(tensor.requires_grad for tensor in self.model.parameters()):
            name = type(self.model).__name__
            raise InputError(f"the model {name} has no parameters to train; set requires_grad on some of them")
        if self.metrics is not None:
            object.__setattr__(self, "metrics", named_metrics(self.metrics))

    def named_metrics(self) -> dict[str, Metric]:
        """Return the metrics by name."""
        return named_metrics(self.metrics or ())

    def fitted(self, examples: Examples) -> "Task":
        """Return the task as it is trained on examples.

        Batch norms normalise by the statistics of the batch and track none, the loss takes the examples' targets, and
        metrics that the user left open are those that the targets ask for.

        Raises:
            InputError: If the model cannot run on the inputs, or the loss does not take the targets.
        """
        with seeded(0, "look"):
            inputs, targets = examples.read(slice(2))
        task = self.static(inputs)
        if count(inputs) < 2:  # batch norm refuses one example
            inputs, targets = join([inputs, inputs]), torch.cat([targets, targets])
        check_stateless(task.model, inputs)
        with torch.no_grad(), ambient(0, "look"):
            scores = call_model(copy.deepcopy(task.model).cpu().eval(), copy_of(inputs))
            loss = fit_loss(self.loss, scores, targets)
            decision = decision_of(loss, scores, targets) if _may_be_classes(examples, scores, targets) else None
            metrics = self.metrics if self.metrics is not None else default_metrics(decision, scores, targets)
        return replace(task, loss=loss, metrics=metrics, decision=decision)

    def static(self, example: Inputs) -> "Task":
        """Return this task with batch norms that normalise by the statistics of the batch and track none.

        Args:
            example: A batch of inputs, with which the model is traced.
        """
        structure = trace(self.model, example)
        return replace(self, model=static_form(structure, self.model)) if structure.moving else self


def _may_be_classes(examples: Examples, scores: Tensor, targets: Tensor) -> bool:
    """Return whether targets may be class numbers: those of several scores, or 0 and 1 only."""
    if scores.numel() != targets.numel():
        return True
    if examples.labels is not None:
        return bool(((examples.labels == 0) | (examples.labels == 1)).all())
    with seeded(0, "look"):
        targets = examples.read(slice(LOOKED_AT))[1]
    return bool(((targets == 0) | (targets == 1)).all())
