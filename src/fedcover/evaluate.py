"""Accuracy and loss: of the global model, and of each client's sub-model on its own label mix."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcover.data import Examples
from fedcover.params import Mask, Params, prune, put_params

BATCH = 2000


@dataclass(frozen=True)
class Score:
    """How a model does on a test set."""

    loss: float
    accuracy: float
    by_class: Tensor
    """Accuracy on each class; NaN for a class that the test set has not."""


def evaluate(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], theta: Params, test: Examples) -> Score:
    """The score of theta, in evaluation mode; ``model`` lends its structure and is left as it was."""
    scratch = copy.deepcopy(model).eval()
    put_params(scratch, theta)
    total = 0.0
    right = torch.zeros(test.classes, dtype=torch.float64)
    with torch.no_grad():
        for x, y in zip(test.inputs.split(BATCH), test.labels.split(BATCH), strict=True):
            scores = scratch(x)
            total += float(loss(scores, y)) * len(x)
            right += torch.bincount(y[scores.argmax(1) == y], minlength=test.classes)
    return Score(total / len(test), float(right.sum()) / len(test), right / test.label_counts())


def local_accuracy(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    theta: Params,
    masks: Sequence[Mask],
    mixes: Sequence[Tensor],
    sizes: Sequence[int],
    test: Examples,
) -> float | None:
    """sum_n p_n Acc(theta o m_n) on test data with client n's own label mix; p_n is its share of the examples.

    Re-weighting the accuracy on each class by the client's mix is the same as testing on data of
    that mix, and needs one pass for each different mask. Classes that the test set has not are left
    out of a mix; a client left with none does not count. None if nobody counts.
    """
    tested = test.label_counts() > 0
    by_mask: dict[int, Tensor] = {}
    total, weight = 0.0, 0
    for mask, mix, size in zip(masks, mixes, sizes, strict=True):
        here = tested & (mix > 0)
        if not bool(here.any()):
            continue
        if id(mask) not in by_mask:
            by_mask[id(mask)] = evaluate(model, loss, prune(theta, mask), test).by_class
        total += size * float((mix[here] * by_mask[id(mask)][here]).sum() / mix[here].sum())
        weight += size
    return total / weight if weight else None
