"""Loss, accuracy and metrics of a model on a test set: the definition that ``Evaluator`` agrees with."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedcover.data import Examples, Inputs
from fedcover.data.examples import IGNORED
from fedcover.data.inputs import copy_of, to_device
from fedcover.errors import InputError
from fedcover.params import Params, device_of, put_params
from fedcover.seeding import seeded
from fedcover.structure.batch_norm import gather_statistics
from fedcover.structure.calls import call_model
from fedcover.training.metrics import METRICS, PREDICTIONS, Metric
from fedcover.training.targets import Decision, Loss, fitted_targets, hits_of
from fedcover.training.task import Task

BATCH = 2000
"""Number of examples whose loss is computed at once."""
BATCH_ON_GPU = 10_000


@dataclass(frozen=True)
class Score:
    """The scores of a model on a test set."""

    loss: float
    accuracy: float | None
    """None if the targets are values, not classes."""
    by_class: Tensor
    """Accuracy on each class; NaN for a class that the test set does not contain."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """The task's metrics by name; None for one that is not finite."""


def evaluate(
    model: nn.Module,
    loss: Loss,
    theta: Params,
    test: Examples,
    norms_from: Inputs | None = None,
    decision: Decision | None = Decision(),  # noqa: B008 - it is frozen
) -> Score:
    """Return the score of theta in evaluation mode, on theta's device, without metrics.

    If an example has several labels, as the characters of a text, each of them counts, except those to ignore.

    Args:
        model: The module that theta belongs to; it is not changed.
        loss: Maps (scores, labels) to the mean loss of a batch.
        theta: The parameters to evaluate.
        test: The test set.
        norms_from: Inputs over which batch norms first gather their statistics; None without batch norms.
        decision: What scores predict; None for values.
    """
    device = device_of(theta)
    test, scratch = test.on_device(device), copy.deepcopy(model).to(device).eval()
    put_params(scratch, theta)
    if norms_from is not None:
        gather_statistics(scratch, norms_from)
    totals = ScoreSum(device)
    size = batch_on(device)
    with torch.no_grad():
        for start in range(0, len(test), size):
            x, y = read_test(test, slice(start, start + size), device)
            scores = call_model(scratch, copy_of(x)).detach()  # a model may write to its input
            totals.add_loss(loss, scores, y)
            if decision is not None:
                totals.add_hits(*hits_of(decision, scores, y, num_classes(test, scores, decision)))
    return totals.score()


def batch_on(device: torch.device) -> int:
    """Return the number of examples whose loss is computed at once on a device."""
    return BATCH if device.type == "cpu" else BATCH_ON_GPU


def read_test(test: Examples, rows: slice, device: torch.device) -> tuple[Inputs, Tensor]:
    """Return test examples on a device; random numbers in reading them depend only on the rows."""
    if test.in_memory:
        return test.read(rows)
    with seeded(0, "test", rows.start):
        x, y = test.read(rows)
    return to_device(x, device), y.to(device)


def num_classes(test: Examples, scores: Tensor, decision: Decision) -> int:
    """Return the number of classes to count predictions in."""
    return max(test.classes, 2) if decision.threshold is not None else test.classes or scores.shape[decision.axis]


def measure(metrics: Mapping[str, Metric], task: Task, scores: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Return the metrics of all scores of a test set; None for one that is not finite.

    Metrics get the classes as axis 1. Built-in ones get targets in the form that the loss takes, and those of
    predictions scores whose threshold is at 0, and class numbers in place of probabilities.

    Raises:
        InputError: If a metric fails or does not return one number.
    """
    decision, values = task.decision, dict[str, float | None]()
    fitted = fitted_targets(task.loss, scores, targets)
    if decision is not None and decision.axis == -1:
        scores = scores.movedim(-1, 1)
    for name, metric in metrics.items():
        at, truth = scores, fitted if metric in METRICS.values() else targets
        if metric in PREDICTIONS:
            if decision is None:
                raise InputError(f"metric '{name}' needs classes, but the labels are values; use rmse, mae or r2")
            at = scores - (decision.threshold or 0.0)
            truth = decision.truth(fitted) if decision.soft else fitted
        try:
            value = float(metric(at, truth))
        except Exception as error:
            raise InputError(
                f"metric '{name}' failed on scores of shape {tuple(scores.shape)} and labels of shape"
                f" {tuple(targets.shape)}: {error or type(error).__name__}; a metric takes (scores, labels) of the test"
                f" set and returns one number"
            ) from error
        values[name] = value if math.isfinite(value) else None
    return values


class ScoreSum:
    """The sums of losses and right predictions over a test set."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = torch.zeros((), dtype=torch.float64, device=device)
        self._hits: tuple[Tensor, Tensor] | None = None

    def add_loss(self, loss: Loss, scores: Tensor, targets: Tensor) -> None:
        """Add the loss of a batch, weighted by its examples, or by their labels that are not to be ignored."""
        weight = torch.full_like(self._weight, len(targets))
        if not targets.is_floating_point() and targets.numel():
            weight *= (targets != IGNORED).double().mean()
        value = loss(scores, targets).double()
        self._loss += torch.where(weight > 0, value * weight, 0.0)
        self._weight += weight

    def add_hits(self, right: Tensor, seen: Tensor) -> None:
        """Add right predictions and labels in each class."""
        before = self._hits or (torch.zeros_like(right), torch.zeros_like(seen))
        self._hits = (before[0] + right, before[1] + seen)

    def score(self) -> Score:
        """Return the score, without metrics."""
        right, seen = self._hits or (self._loss.new_zeros(0), self._loss.new_zeros(0))
        sums = torch.cat([self._loss.view(1), self._weight.view(1), right, seen]).cpu()  # one synchronisation
        right, seen = sums[2:].chunk(2)
        accuracy = float(right.sum() / seen.sum()) if self._hits and bool(seen.any()) else None
        return Score(float(sums[0] / sums[1]), accuracy, right / seen)
