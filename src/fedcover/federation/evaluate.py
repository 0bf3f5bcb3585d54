"""Accuracy and loss: of the global model, and of each client's sub-model on its own label mix."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedcover.data import Examples
from fedcover.params import Params, device_of, put_params
from fedcover.structure.batch_norm import gather_statistics

BATCH = 2000
"""Number of examples whose loss is computed at once."""
BATCH_ON_GPU = 10_000


@dataclass(frozen=True)
class Score:
    """The loss and accuracy of a model on a test set."""

    loss: float
    accuracy: float
    by_class: Tensor
    """Accuracy on each class; NaN for a class that the test set does not contain."""


def evaluate(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    theta: Params,
    test: Examples,
    norms_from: Tensor | None = None,
) -> Score:
    """Return the score of theta in evaluation mode, on theta's device: the definition that ``Evaluator`` agrees with.

    If an example has several labels, as the characters of a text, each of them counts.

    Args:
        model: The module that theta belongs to; it is not changed.
        loss: Maps (scores, labels) to the mean loss of a batch.
        theta: The parameters to evaluate.
        test: The test set.
        norms_from: Inputs over which batch norms first gather their statistics; None without batch norms.
    """
    device = device_of(theta)
    test, scratch = test_on(test, device), copy.deepcopy(model).to(device).eval()
    put_params(scratch, theta)
    if norms_from is not None:
        gather_statistics(scratch, norms_from)
    total = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros(test.classes, dtype=torch.float64, device=device)
    with torch.no_grad():
        for x, y in zip(test.inputs.split(batch_on(device)), test.labels.split(batch_on(device)), strict=True):
            scores = scratch(x.clone())  # a model may write to its input
            total += loss(scores, y).double() * len(x)
            right += correct(scores, y, test.classes)
    return score_of(total, right, test)


def batch_on(device: torch.device) -> int:
    """Return the number of examples whose loss is computed at once on a device."""
    return BATCH if device.type == "cpu" else BATCH_ON_GPU


def correct(scores: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the number of correct predictions in each class."""
    hits = (scores.argmax(1) == labels).double().flatten()
    return torch.zeros(classes, dtype=torch.float64, device=hits.device).index_add_(0, labels.flatten(), hits)


def score_of(total: Tensor, right: Tensor, test: Examples) -> Score:
    """Return the score from the sum of losses and the number of correct predictions in each class."""
    seen = test.label_counts().double()
    sums = torch.cat([total.view(1), right, seen]).cpu()  # one synchronisation with a GPU
    right, seen = sums[1:].chunk(2)
    return Score(float(sums[0]) / len(test), float(right.sum() / seen.sum()), right / seen)


def test_on(test: Examples, device: torch.device) -> Examples:
    """Return a test set on a device; the same object if it is there already."""
    if test.inputs.device == device == test.labels.device:
        return test
    return replace(test, inputs=test.inputs.to(device), labels=test.labels.to(device))
