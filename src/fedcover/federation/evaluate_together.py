"""Evaluation of many runs at once: the models of all of them are one batch, which saves a GPU thousands of launches.

The scores are those of ``Evaluator.evaluate`` up to rounding.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedcover.data import Examples
from fedcover.data.inputs import copy_of
from fedcover.federation.evaluate import Score, batch_on, num_classes
from fedcover.federation.evaluator import Evaluator, LocalTest
from fedcover.params import Mask, Params, device_of
from fedcover.structure.calls import call_with
from fedcover.training.losses import batchable
from fedcover.training.targets import hits_of

AT_ONCE = 64
"""The number of models in one forward pass."""


class EvaluationRequest(NamedTuple):
    """The models of one run after a round."""

    evaluator: Evaluator
    theta: Params
    shown: Mask
    """The mask of the global model."""
    clients: Sequence[LocalTest]
    """The clients of the round; none for no local accuracy."""

    def masks(self) -> list[Mask]:
        """Return the mask of the global model, and the other distinct masks of clients."""
        return [self.shown, *{id(client.mask): client.mask for client in self.clients}.values()]


Evaluated = tuple[Score, float | None]
"""The score of a global model, and the local accuracy of its clients."""


def evaluate_together(requests: Sequence[EvaluationRequest], test: Examples) -> list[Evaluated] | None:
    """Return the results of several runs; None if their models cannot be one batch.

    Args:
        requests: The runs.
        test: Their test set, on the device of their parameters.
    """
    if not requests or not _are_alike(requests, test):
        return None
    models = [(request.theta, mask) for request in requests for mask in request.masks()]
    firsts = [0]
    for request in requests:
        firsts.append(firsts[-1] + len(request.masks()))
    evaluator = requests[0].evaluator
    try:
        with torch.no_grad(), evaluator.products():
            parts = [_sums(evaluator, models[at : at + AT_ONCE], test) for at in range(0, len(models), AT_ONCE)]
    except torch.OutOfMemoryError:
        return None
    except RuntimeError:  # an operation that cannot be batched
        evaluator.can_be_together = False
        return None
    losses, right, seen = (torch.cat(sums).cpu() for sums in zip(*parts, strict=True))
    return [
        _evaluated(request, float(losses[first]), right[first:end], seen[first])
        for request, (first, end) in zip(requests, pairwise(firsts), strict=True)
    ]


def _are_alike(requests: Sequence[EvaluationRequest], test: Examples) -> bool:
    """Return whether the models of runs can be one batch: plain ones, without statistics, metrics or buffers."""
    first = requests[0]
    evaluators = [request.evaluator for request in requests]
    return (
        test.in_memory
        and len(test) <= batch_on(device_of(first.theta))
        and all(one.can_be_together for one in evaluators)
        and len({one.together_key for one in evaluators}) == 1
    )


def _sums(evaluator: Evaluator, models: Sequence[tuple[Params, Mask]], test: Examples) -> tuple[Tensor, ...]:
    """Return the loss of each model, and its right predictions and labels in each class."""
    task, (inputs, targets) = evaluator.task, test.read(slice(0, len(test)))
    stacks = {name: torch.stack([theta[name] for theta, _ in models]) for name in models[0][0]}
    for name, stack in stacks.items():
        if any(name in mask for _, mask in models):
            whole = torch.ones_like(stack[0], dtype=torch.bool)
            kept = torch.stack([mask.get(name, whole) for _, mask in models])
            stack.masked_fill_(~kept, 0.0)
    model, loss = evaluator.scratch(targets.device), batchable(task.loss)

    def measure(theta: Params) -> tuple[Tensor, Tensor, Tensor]:
        scores = call_with(model, theta, copy_of(inputs))
        decision = task.decision
        assert decision is not None
        right, seen = hits_of(decision, scores, targets, num_classes(test, scores, decision))
        return loss(scores, targets).double(), right, seen

    sums: tuple[Tensor, ...] = vmap(measure)(stacks)
    return sums


def _evaluated(request: EvaluationRequest, loss: float, right: Tensor, seen: Tensor) -> Evaluated:
    """Return one run's result from the sums of its models."""
    accuracy = float(right[0].sum() / seen.sum()) if bool(seen.any()) else None
    return Score(loss, accuracy, right[0] / seen), _local_accuracy(request, right, seen)


def _local_accuracy(request: EvaluationRequest, right: Tensor, labels: Tensor) -> float | None:
    """Return the local accuracy of clients, from the right predictions of their models; see ``Evaluator.evaluate``."""
    if not request.clients:
        return None
    number = {id(mask): i for i, mask in reversed(list(enumerate(request.masks())))}
    rows = torch.tensor([number[id(client.mask)] for client in request.clients])
    mixes = torch.stack([client.mix for client in request.clients])
    mixes = torch.where(labels > 0, mixes, 0.0)
    examples = torch.tensor([client.examples for client in request.clients], dtype=torch.float64)
    shares = mixes.sum(1)
    counted = shares > 0
    if not bool(counted.any()):
        return None
    by_class = torch.where(labels > 0, right / labels.clamp_min(1), 0.0)[rows]
    accuracies = (mixes * by_class).sum(1) / shares.clamp_min(1e-300)
    return float((accuracies * examples)[counted].sum() / examples[counted].sum())
