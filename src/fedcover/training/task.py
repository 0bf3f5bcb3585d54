"""The task: a model, its loss and its metrics."""

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.data import Examples
from fedcover.data.examples import IGNORED
from fedcover.data.inputs import Inputs, copy_of, take
from fedcover.errors import InputError
from fedcover.seeding import ambient, seeded
from fedcover.structure.batch_norm import static_form
from fedcover.structure.calls import call_output, scores_of
from fedcover.structure.exits import with_prediction
from fedcover.structure.model_key import Same, model_key
from fedcover.structure.state import check_stateless
from fedcover.structure.trace import ModelStructure, check_initialised, trace
from fedcover.training.metrics import Metric, default_metrics, named_metrics
from fedcover.training.targets import Decision, Loss, class_axes, decision_of, fit_loss, name_of

LOOKED_AT = 64
"""The number of examples whose targets are looked at, of a lazy data set for everything."""


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
        prediction: How a model with exits predicts: by the ``mean`` of the scores of its exits, or by the ``last`` one;
            by default as the policy does. The loss and the metrics are those of this prediction; what a client trains
            is a loss over its exits, see ``fedcover.training.exits``.
        decision: What scores predict; None for values. ``fitted`` sets it.

    Raises:
        InputError: If no parameter of the model requires gradients.

    >>> Task(nn.Linear(4, 2)).loss.__name__
    'cross_entropy'
    """

    model: nn.Module
    loss: Loss = F.cross_entropy
    metrics: "Sequence[Metric | str] | Mapping[str, Metric | str] | Metric | str | None" = None
    prediction: str | None = None
    decision: Decision | None = field(default_factory=Decision, repr=False, kw_only=True)
    _structure: ModelStructure | None = field(default=None, init=False, repr=False, compare=False)
    _fits: "list[_Fit]" = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"model must be a torch.nn.Module; got {type(self.model).__name__}")
        if isinstance(self.loss, type):
            name = self.loss.__name__
            raise InputError(f"loss must be a function (scores, labels) -> mean loss; got a class; write {name}()")
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

    def key(self) -> Any:
        """Return what tasks must share for their clients to be trained, or their models evaluated, as one batch."""
        return model_key(self.model), Same(self.loss)

    def structure(self, example: Inputs) -> ModelStructure:
        """Return the structure of the model, which is traced once.

        Args:
            example: A batch of inputs.
        """
        if self._structure is None:
            object.__setattr__(self, "_structure", trace(self.model, example))
        assert self._structure is not None
        return self._structure

    def predicting(self, prediction: str) -> "Task":
        """Return the task with a model that predicts as the task asks for, or else in another way.

        Args:
            prediction: How a model with exits predicts if the task leaves it open: ``mean`` or ``last``.

        Raises:
            InputError: If there is no such prediction.
        """
        model = with_prediction(self.model, self.prediction or prediction)
        if model is self.model:
            return self
        task = replace(self, model=model)
        object.__setattr__(task, "_fits", self._fits)  # else every federation would fit the task again
        return task

    def fitted(self, examples: Examples) -> "Task":
        """Return the task as it is trained on examples.

        Batch norms normalise by the statistics of the batch and track none, the loss takes the examples' targets, and
        metrics that the user left open are those that the targets ask for. Federations with the same task and examples
        share one fitted task, as long as the model stays as it is.

        Raises:
            InputError: If the model cannot run on the inputs, or the loss does not take the targets.
        """
        check_initialised(self.model)
        key = model_key(self.model)
        for fit in self._fits:
            if fit.examples() is examples and fit.key == key and _same_values(fit.model, self.model):
                return fit.task
        with one_thread():  # for two examples more are hardly faster, and far slower where other work keeps a core busy
            task = self._fit(examples)
            structure = task.structure(examples.example())
        self._fits[:] = [_Fit(ref(examples), key, structure.model, task)]
        return task

    def _fit(self, examples: Examples) -> "Task":
        """Check that the model can be trained on examples, and return the task as it is trained."""
        inputs, targets = _two_rows(examples)
        task = self.static(inputs)
        check_stateless(task.model, inputs)
        every = _all_targets(examples)
        whole = not every.is_floating_point() or (examples.labels is not None and bool((every == every.round()).all()))
        with torch.no_grad(), ambient(0, "look"):
            output = call_output(copy.deepcopy(task.model).cpu().eval(), copy_of(inputs))
            scores = scores_of(output)
            loss = fit_loss(self.loss, scores, targets, whole, classes_last=hasattr(output, "logits"))
            binary = bool(((every == 0) | (every == 1) | (every == IGNORED)).all())
            decision = decision_of(loss, scores, targets, binary)
            metrics = self.metrics if self.metrics is not None else default_metrics(decision, scores, targets)
        check_classes(examples, scores, decision)
        if loss is self.loss and len(class_axes(scores, targets)) > 1 and decision is not None and decision.axis == 1:
            shape = tuple(scores.shape[1:])
            warnings.warn(
                f"the scores of an example have the shape {shape}, and the classes are taken to be the first axis, as"
                f" {name_of(loss)} takes them; if they are the last, move them in the model or the loss",
                stacklevel=4,
            )
        return replace(task, loss=loss, decision=decision, metrics=metrics)

    def static(self, example: Inputs) -> "Task":
        """Return this task with batch norms that normalise by the statistics of the batch and track none.

        Args:
            example: A batch of inputs, with which the model is traced.
        """
        structure = trace(self.model, example)
        return replace(self, model=static_form(structure, self.model)) if structure.moving else self


class _Fit(NamedTuple):
    """A fitted task, and what it was fitted to."""

    examples: Any
    """A weak reference."""
    key: Any
    model: nn.Module
    """A copy of the model, with its parameters."""
    task: Task


def _same_values(one: nn.Module, other: nn.Module) -> bool:
    """Return whether the parameters of two models with the same key are equal."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a.detach().cpu(), b.detach().cpu()) for a, b in pairs)


def _two_rows(examples: Examples) -> tuple[Inputs, Tensor]:
    """Return two examples, whose targets differ if some of the first do; one example twice if there is only one."""
    with seeded(0, "look"):
        inputs, targets = examples.read(slice(LOOKED_AT))
    differ = [row for row in range(1, len(targets)) if not torch.equal(targets[row], targets[0])]
    rows = torch.tensor([0, differ[0] if differ else min(1, len(targets) - 1)])
    return take(inputs, rows), targets[rows.to(targets.device)].cpu()


def _all_targets(examples: Examples) -> Tensor:
    """Return all targets, or the first ones of a lazy data set."""
    if examples.labels is not None:
        return examples.labels
    with seeded(0, "look"):
        return examples.read(slice(LOOKED_AT))[1]


def check_classes(examples: Examples, scores: Tensor, decision: Decision | None) -> None:
    """Raise InputError if a class number has no score, or all labels are to be ignored."""
    if decision is None or decision.threshold is not None or decision.soft or examples.labels is None:
        return
    if examples.classes and int(examples.label_counts().sum()) == 0:
        raise InputError(f"all labels of {examples.name} are {IGNORED}, which are ignored; give labels to learn from")
    most, outputs = int(examples.labels.max()), scores.shape[decision.axis]
    if most >= outputs:
        raise InputError(
            f"{examples.name} has the class number {most}, but the model has only {outputs} scores, for classes 0 to"
            f" {outputs - 1}; give it more outputs, or renumber the classes"
        )
