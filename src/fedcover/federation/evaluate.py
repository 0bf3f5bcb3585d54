"""Accuracy and loss: of the global model, and of each client's sub-model on its own label mix."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fedcover.data import Examples
from fedcover.params import Mask, Params, device_of, prune, put_params
from fedcover.structure.batch_norm import gather_statistics, has_statistics

BATCH = 2000
BATCH_ON_GPU = 10_000

_scratches: "WeakKeyDictionary[nn.Module, dict[torch.device, nn.Module]]" = WeakKeyDictionary()


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
    """Return the score of theta in evaluation mode, on theta's device.

    If an example has several labels, as the characters of a text, each of them counts.

    Args:
        model: The module that theta belongs to; it is not changed.
        loss: Maps (scores, labels) to the mean loss of a batch.
        theta: The parameters to evaluate.
        test: The test set.
        norms_from: Inputs over which batch norms first gather their statistics; None without batch norms.
    """
    device = device_of(theta)
    test, scratch = test_on(test, device), _scratch(model, device)
    put_params(scratch, theta)
    if norms_from is not None:
        gather_statistics(scratch, norms_from)
    size = BATCH if device.type == "cpu" else BATCH_ON_GPU
    total = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros(test.classes, dtype=torch.float64, device=device)
    seen = torch.zeros_like(right)
    with torch.no_grad():
        for x, y in zip(test.inputs.split(size), test.labels.split(size), strict=True):
            scores = scratch(x.clone())  # a model may write to its input
            total += loss(scores, y).double() * len(x)
            correct = (scores.argmax(1) == y).double().flatten()
            right.index_add_(0, y.flatten(), correct)
            seen.index_add_(0, y.flatten(), torch.ones_like(correct))
    sums = torch.cat([total.view(1), right, seen]).cpu()  # one synchronisation with a GPU
    right, seen = sums[1:].chunk(2)
    return Score(float(sums[0]) / len(test), float(right.sum() / seen.sum()), right / seen)


def test_on(test: Examples, device: torch.device) -> Examples:
    """Return a test set on a device; the same object if it is there already."""
    if test.inputs.device == device == test.labels.device:
        return test
    return replace(test, inputs=test.inputs.to(device), labels=test.labels.to(device))


def _scratch(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy of a model for evaluation, one per device."""
    copies = _scratches.setdefault(model, {})
    if device not in copies:
        copies[device] = copy.deepcopy(model).to(device)
    if not has_statistics(model):
        with torch.no_grad():
            for ours, theirs in zip(copies[device].buffers(), model.buffers(), strict=True):
                ours.copy_(theirs)
    return copies[device].eval()


def local_accuracy(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    theta: Params,
    masks: Sequence[Mask],
    mixes: Sequence[Tensor],
    sizes: Sequence[int],
    test: Examples,
    norms_from: Tensor | None = None,
) -> float | None:
    """Return sum_n p_n Acc(theta o m_n) on test data with client n's label mix; p_n is its share of the examples.

    Weighting the accuracy on each class by the client's mix equals testing on data of that mix, and needs one pass per
    distinct mask. Classes that the test set does not contain are left out of a mix. A client without any class left
    does not count; the result is None if no client counts.
    """
    test = test_on(test, device_of(theta))
    tested = test.label_counts().cpu() > 0
    by_mask: dict[int, Tensor] = {}
    total, weight = 0.0, 0
    for mask, mix, size in zip(masks, mixes, sizes, strict=True):
        here = tested & (mix > 0)
        if not bool(here.any()):
            continue
        if id(mask) not in by_mask:
            by_mask[id(mask)] = evaluate(model, loss, prune(theta, mask), test, norms_from).by_class
        total += size * float((mix[here] * by_mask[id(mask)][here]).sum() / mix[here].sum())
        weight += size
    return total / weight if weight else None
