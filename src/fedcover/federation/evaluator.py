"""Evaluation of a round: the global model and the distinct sub-models of its clients.

Sub-models are shrunk, and threads share the work where the engine has workers. Every operation runs on one thread, so
that results do not depend on the number of workers.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.data import Examples
from fedcover.federation.evaluate import Score, batch_on, correct, score_of, test_on
from fedcover.masks.content import content_keys
from fedcover.params import FULL, Mask, Params, device_of, prune, put_params
from fedcover.structure.batch_norm import gather_statistics, has_statistics, spread_over, statistics_examples
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure
from fedcover.training.task import Task

CHUNK_WORK = 5e10
"""Multiply-adds of one forward pass on a CPU; activations of larger batches do not fit into caches."""
SMALLEST_CHUNK = 50

Progress = Callable[[int, int], None]
"""Called with the number of examples that were evaluated so far, over all models, and their total."""


class LocalTest(NamedTuple):
    """One client's part in local accuracy."""

    mask: Mask
    mix: Tensor
    """The share of each class in the client's labels."""
    examples: int


class Evaluator:
    """An evaluator of the models of one federation.

    Args:
        task: The model and its loss.
        structure: The structure of the model.
        inputs: The clients' inputs, over which batch norms gather their statistics.
        shrink: Whether sub-models are evaluated physically smaller, on a CPU. Accuracies are the same, up to
            predictions that rounding decides.

    Attributes:
        workers: Number of threads that evaluate on a CPU.
        on_progress: Callback for progress.
    """

    def __init__(self, task: Task, structure: ModelStructure, inputs: Tensor, shrink: bool = True) -> None:
        self._task, self._structure, self._inputs, self._shrink = task, structure, inputs, shrink
        self._work = sum(math.prod(shape) * structure.macs[name] for name, shape in structure.shapes.items())
        self._scratches: dict[tuple[torch.device, int], nn.Module] = {}
        self._norm_inputs: Tensor | None = None
        self.workers = 1
        self.on_progress: Progress = lambda done, total: None

    def score(self, theta: Params, test: Examples) -> Score:
        """Return the score of a whole model on a test set."""
        return self.evaluate(theta, test)[0]

    def evaluate(
        self, theta: Params, test: Examples, shown: Mask = FULL, clients: Sequence[LocalTest] = ()
    ) -> tuple[Score, float | None]:
        """Return the score of the global model, and the local accuracy of clients.

        Local accuracy is sum_n p_n Acc(theta o m_n) on test data with client n's label mix; p_n is its share of the
        examples. Weighting the accuracy on each class by the client's mix equals testing on data of that mix, and needs
        one pass per distinct mask. Classes that the test set does not contain are left out of a mix. A client without
        any class left does not count; the result is None if no client counts.

        Args:
            theta: The global parameters.
            test: The test set.
            shown: The mask of the global model.
            clients: The clients of the round; none for no local accuracy.
        """
        test = test_on(test, device_of(theta))
        tested = test.label_counts().cpu() > 0
        counted = [client for client in clients if bool((tested & (client.mix > 0)).any())]
        masks = [shown, *(client.mask for client in counted)]
        keys = content_keys(masks, theta) if counted else [0]
        distinct = dict(zip(reversed(keys), reversed(masks), strict=True))
        order = list(dict.fromkeys(keys))
        total, rights = self._sums(theta, [distinct[key] for key in order], test)
        score = score_of(total, rights[0], test)
        if not counted:
            return score, None
        by_class = dict(zip(order, (torch.stack(rights) / test.label_counts()).cpu(), strict=True))
        accuracy, examples = 0.0, 0
        for client, key in zip(counted, keys[1:], strict=True):
            here = tested & (client.mix > 0)
            mix = client.mix[here]
            accuracy += client.examples * float((mix * by_class[key][here]).sum() / mix.sum())
            examples += client.examples
        return score, accuracy / examples

    def _sums(self, theta: Params, masks: Sequence[Mask], test: Examples) -> tuple[Tensor, list[Tensor]]:
        """Return the sum of the first model's losses, and the correct predictions of each model in each class."""
        device = device_of(theta)
        workers = self.workers if device.type == "cpu" else 1
        spans, norms, done = self._spans(len(test), device), self._norms_from(device), 0
        total = len(masks) * (len(test) + len(norms))
        losses = _LossSum(self._task.loss, test)
        rights = [torch.zeros(test.classes, dtype=torch.float64, device=device) for _ in masks]
        with ExitStack() as stack:
            stack.enter_context(one_thread())
            apply: Callable[..., Iterator[Any]] = map
            if workers > 1:
                apply = stack.enter_context(ThreadPoolExecutor(workers)).map
            for first in range(0, len(masks), workers):  # as many models at once as there are workers, to save memory
                numbers = range(first, min(first + workers, len(masks)))
                models = [self._model(theta, masks[n], slot, shrink=n > 0) for slot, n in enumerate(numbers)]
                for _ in apply(partial(gather_statistics, inputs=norms), models) if len(norms) else ():
                    done += len(norms)
                    self.on_progress(done, total)
                passes = [_Pass(n, model, *span) for n, model in zip(numbers, models, strict=True) for span in spans]
                for one, result in zip(passes, apply(partial(_predict, test, workers > 1), passes), strict=True):
                    rights[one.number] += losses.add(result, one.start) if one.number == 0 else result
                    done += one.end - one.start
                    self.on_progress(done, total)
        return losses.total, rights

    def _spans(self, examples: int, device: torch.device) -> list[tuple[int, int]]:
        """Return the first and last example of each forward pass; together they are the batches of the loss."""
        batch = batch_on(device)
        chunk = max(SMALLEST_CHUNK, int(CHUNK_WORK / self._work)) if self._work and device.type == "cpu" else batch
        return [
            (start, min(start + chunk, first + batch, examples))
            for first in range(0, examples, batch)
            for start in range(first, min(first + batch, examples), chunk)
        ]

    def _norms_from(self, device: torch.device) -> Tensor:
        """Return the inputs over which batch norms gather statistics; no inputs without batch norms."""
        if not has_statistics(self._task.model):
            return torch.empty(0)
        if self._norm_inputs is None or self._norm_inputs.device != device:
            self._norm_inputs = spread_over(self._inputs, statistics_examples(self._work)).to(device)
        return self._norm_inputs

    @cached_property
    def _shrinker(self) -> Shrinker:
        return Shrinker(self._structure)

    def _model(self, theta: Params, mask: Mask, slot: int, shrink: bool) -> nn.Module:
        """Return a module with the parameters theta o m; it is used until the next call for the same slot."""
        device = device_of(theta)
        if shrink and self._shrink and device.type == "cpu" and _removes_slices(mask):
            sub = self._shrinker.shrink(mask)
            if sub.cuts:
                put_params(sub.model, prune(sub.cut(theta), sub.mask))
                return sub.model.eval()
        if (device, slot) not in self._scratches:
            self._scratches[device, slot] = copy.deepcopy(self._task.model).to(device)
        scratch = self._scratches[device, slot]
        if not has_statistics(scratch):
            with torch.no_grad():
                for ours, theirs in zip(scratch.buffers(), self._task.model.buffers(), strict=True):
                    ours.copy_(theirs)
        put_params(scratch, prune(theta, mask) if mask else theta)
        return scratch.eval()


class _Pass(NamedTuple):
    """One forward pass of one model over the examples from ``start`` to ``end``."""

    number: int
    """Number of the model; the global model is 0."""
    model: nn.Module
    start: int
    end: int


def _predict(test: Examples, replicate: bool, one: _Pass) -> Tensor:
    """Return the scores of the global model, or the correct predictions of a sub-model in each class."""
    # A model may keep values of a forward pass as attributes, so threads do not share one.
    model = _replica(one.model) if replicate else one.model
    with torch.no_grad():
        scores: Tensor = model(test.inputs[one.start : one.end].clone())  # a model may write to its input
        return scores if one.number == 0 else correct(scores, test.labels[one.start : one.end], test.classes)


class _LossSum:
    """The sum of losses over a test set, from scores that arrive in order; each loss is that of a whole batch."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], test: Examples) -> None:
        self._loss, self._test, self._scores = loss, test, list[Tensor]()
        self._size, self._start = batch_on(test.inputs.device), 0
        self.total = torch.zeros((), dtype=torch.float64, device=test.inputs.device)

    def add(self, scores: Tensor, start: int) -> Tensor:
        """Add scores of the examples from ``start`` on, and return the correct predictions in each class."""
        self._scores.append(scores)
        end = start + len(scores)
        if end % self._size == 0 or end == len(self._test):
            batch, labels = torch.cat(self._scores), self._test.labels[self._start : end]
            self.total += self._loss(batch, labels).double() * len(labels)
            self._scores, self._start = [], end
        return correct(scores, self._test.labels[start:end], self._test.classes)


def _removes_slices(mask: Mask) -> bool:
    """Return whether a mask removes all entries at some index of an axis, as it does if it removes a whole unit."""
    return any(
        not bool(kept.movedim(axis, 0).flatten(1).any(1).all())
        for kept in mask.values()
        if kept.ndim > 1
        for axis in (0, 1)
    )


def _replica(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
