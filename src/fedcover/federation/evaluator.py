"""Evaluation of a round: the global model and the distinct sub-models of its clients.

Sub-models are shrunk, and threads share the work where the engine has workers. Every operation runs on one thread, so
that results do not depend on the number of workers.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property, partial
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcover._threads import one_thread
from fedcover.data import Examples, Inputs
from fedcover.data.inputs import copy_of, count, parts_of, take, to_device
from fedcover.engines.vectorized.precision import Precision
from fedcover.federation.evaluate import Score, ScoreSum, batch_on, measure, num_classes, read_test
from fedcover.masks.content import content_keys
from fedcover.params import FULL, Mask, Params, device_of, prune, put_params
from fedcover.seeding import seeded
from fedcover.structure.batch_norm import gather_statistics, has_statistics, spread_over, statistics_examples
from fedcover.structure.calls import call_model
from fedcover.structure.exits import limit_exits
from fedcover.structure.layouts import AnyLayout, gains_from_channels_last, with_channels_last
from fedcover.structure.submodel import Shrinker
from fedcover.structure.trace import ModelStructure
from fedcover.training.metrics import Metric
from fedcover.training.targets import Decision, hits_of
from fedcover.training.task import Task

LARGEST_VALUE = 2**21
"""Entries of the largest tensor in a forward pass on a CPU: larger ones do not fit into caches, and the system maps new
memory for each of them, which takes as long as the pass."""
SMALLEST_CHUNK = 16
ALIKE = 1e-2
"""The largest difference between scores in two layouts, as a share of the largest score: products may be in tf32."""

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
        examples: The clients' examples, over which batch norms gather their statistics.
        shrink: Whether sub-models are evaluated physically smaller, on a CPU. Accuracies are the same, up to
            predictions that rounding decides.

    Attributes:
        workers: Number of threads that evaluate on a CPU.
        can_be_together: Whether models may be evaluated as one batch with those of other runs, as far as is known.
        precision: The precision of training. Models are evaluated in float32, on a GPU with products in tf32 unless
            this is ``fp32``.
        on_progress: Callback for progress.
    """

    def __init__(self, task: Task, structure: ModelStructure, examples: Examples, shrink: bool = True) -> None:
        self.task, self._structure, self._examples, self._shrink = task, structure, examples, shrink
        self._metrics = task.named_metrics()
        self._work = structure.work
        self._scratches: dict[tuple[torch.device, int], nn.Module] = {}
        self._norm_inputs: tuple[torch.device, Inputs] | None = None
        self._passes = _Passes()
        self.workers = 1
        self.precision = "fp32"
        plain = not has_statistics(task.model) and not list(task.model.buffers())
        self.can_be_together = plain and task.decision is not None and not self._metrics
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
        test = test.on_device(device_of(theta))
        labels = test.label_counts().cpu() if clients else torch.zeros(0)
        tested = labels > 0
        counted = [client for client in clients if bool((tested & (client.mix > 0)).any())]
        masks = [shown, *(client.mask for client in counted)]
        keys = content_keys(masks, theta) if counted else [0]
        distinct = dict(zip(reversed(keys), reversed(masks), strict=True))
        order = list(dict.fromkeys(keys))
        score, rights = self._sums(theta, [distinct[key] for key in order], test)
        if not counted:
            return score, None
        by_class = dict(zip(order, torch.stack(rights).cpu() / labels, strict=True))
        accuracy, examples = 0.0, 0
        for client, key in zip(counted, keys[1:], strict=True):
            here = tested & (client.mix > 0)
            mix = client.mix[here]
            accuracy += client.examples * float((mix * by_class[key][here]).sum() / mix.sum())
            examples += client.examples
        return score, accuracy / examples

    def accuracy_of(self, theta: Params, mask: Mask, test: Examples) -> float | None:
        """Return the accuracy of a sub-model on a test set; None if its targets are values."""
        return self._sums(theta, [mask], test.on_device(device_of(theta)))[0].accuracy

    def products(self) -> AbstractContextManager[None]:
        """Return a context in which products have the precision of evaluation."""
        return Precision("fp32" if self.precision == "fp32" else "tf32").steps()

    @cached_property
    def together_key(self) -> Any:
        """What evaluators must share for their models to be evaluated as one batch."""
        return self.task.key(), self.task.decision, self.precision

    def scratch(self, device: torch.device, slot: int = 0) -> nn.Module:
        """Return one of several copies of the model in evaluation mode, on a device, whose parameters do not matter."""
        if (device, slot) not in self._scratches:
            self._scratches[device, slot] = copy.deepcopy(self.task.model).to(device)
        scratch = self._scratches[device, slot].eval()
        limit_exits(scratch, self._structure.exits_in(FULL))
        return scratch

    def _sums(self, theta: Params, masks: Sequence[Mask], test: Examples) -> tuple[Score, list[Tensor]]:
        """Return the score of the first model, and the right predictions of each model in each class."""
        device = device_of(theta)
        workers = self.workers if device.type == "cpu" else 1
        spans, norms, done = self._spans(len(test), device), self._norms_from(device), 0
        of_norms = count(norms) if norms is not None else 0
        total = len(masks) * (len(test) + of_norms)
        first_model = _FirstModel(self.task, self._metrics, test, device)
        rights: list[Tensor | None] = [None] * len(masks)
        predict = _Predict(test, self.task.decision, device, self._passes, replicate=workers > 1)
        with ExitStack() as stack:
            stack.enter_context(one_thread())
            stack.enter_context(self.products())
            apply: Callable[..., Iterator[Any]] = map
            if workers > 1:
                apply = stack.enter_context(ThreadPoolExecutor(workers)).map
            for first in range(0, len(masks), workers):  # as many models at once as there are workers, to save memory
                numbers = range(first, min(first + workers, len(masks)))
                models = [self._model(theta, masks[n], slot, shrink=n > 0) for slot, n in enumerate(numbers)]
                for _ in apply(partial(gather_statistics, inputs=norms), models) if norms is not None else ():
                    done += of_norms
                    self.on_progress(done, total)
                passes = [_Pass(n, model, *span) for n, model in zip(numbers, models, strict=True) for span in spans]
                for one, (scores, targets, hits) in zip(passes, apply(predict, passes), strict=True):
                    if one.number == 0:
                        first_model.add(scores, targets, hits, one.end)
                    if hits is not None:
                        before = rights[one.number]
                        rights[one.number] = hits[0] if before is None else before + hits[0]
                    done += one.end - one.start
                    self.on_progress(done, total)
        return first_model.score(), [right for right in rights if right is not None]

    def _spans(self, examples: int, device: torch.device) -> list[tuple[int, int]]:
        """Return the first and last example of each forward pass; together they are the batches of the loss."""
        batch = batch_on(device)
        most = max(SMALLEST_CHUNK, LARGEST_VALUE // max(1, self._structure.largest_value))
        chunk = most if device.type == "cpu" else batch
        return [
            (start, min(start + chunk, first + batch, examples))
            for first in range(0, examples, batch)
            for start in range(first, min(first + batch, examples), chunk)
        ]

    def _norms_from(self, device: torch.device) -> Inputs | None:
        """Return the inputs over which batch norms gather statistics; None without batch norms."""
        if not has_statistics(self.task.model):
            return None
        if self._norm_inputs is None or self._norm_inputs[0] != device:
            with seeded(0, "statistics"):
                rows = spread_over(len(self._examples), statistics_examples(self._work))
                inputs = self._examples.read(rows)[0]
            self._norm_inputs = device, to_device(inputs, device)
        return self._norm_inputs[1]

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
        scratch = self.scratch(device, slot)
        limit_exits(scratch, self._structure.exits_in(mask))
        if not has_statistics(scratch):
            with torch.no_grad():
                for ours, theirs in zip(scratch.buffers(), self.task.model.buffers(), strict=True):
                    ours.copy_(theirs)
        put_params(scratch, prune(theta, mask) if mask else theta)
        return scratch


class _Pass(NamedTuple):
    """One forward pass of one model over the examples from ``start`` to ``end``."""

    number: int
    """Number of the model; the global model is 0."""
    model: nn.Module
    start: int
    end: int


_Prediction = tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]
"""The scores and targets of the first model, None for the others, and right predictions and labels by class."""


class _Predict:
    """The forward passes of models over a test set."""

    def __init__(
        self, test: Examples, decision: Decision | None, device: torch.device, passes: "_Passes", replicate: bool
    ) -> None:
        self._test, self._decision, self._device, self._replicate = test, decision, device, replicate
        self._passes = passes
        self._reading = Lock()

    def __call__(self, one: _Pass) -> _Prediction:
        # A model may keep values of a forward pass as attributes, so threads do not share one.
        model, rows = _replica(one.model) if self._replicate else one.model, slice(one.start, one.end)
        if self._test.in_memory:
            inputs, targets = self._test.read(rows)
        else:
            with self._reading:  # a data set needs not be safe for threads
                inputs, targets = read_test(self._test, rows, self._device)
        with torch.no_grad():
            scores = self._passes.scores(model, inputs)
            hits = None
            if self._decision is not None:
                classes = num_classes(self._test, scores, self._decision)
                hits = hits_of(self._decision, scores, targets, classes)
        return (scores, targets, hits) if one.number == 0 else (None, None, hits)


class _Passes:
    """Forward passes, with the channels of images last in memory where that is faster.

    They are divided if they do not fit into the memory of a GPU.
    """

    def __init__(self) -> None:
        self._most = 1 << 62  # examples at once
        self._takes_channels_last: bool | None = None

    def scores(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the scores of inputs, on their device; later passes are not larger than those that fitted."""
        if gains_from_channels_last(model, next(iter(parts_of(inputs).values())).device):
            if self._takes_channels_last is None:
                self._takes_channels_last = _takes_channels_last(model, inputs)
            if self._takes_channels_last:
                with AnyLayout():
                    return self._divided(model, with_channels_last(inputs))
        return self._divided(model, inputs)

    def _divided(self, model: nn.Module, inputs: Inputs) -> Tensor:
        parts: list[Tensor] = []
        done, total = 0, count(inputs)
        while done < total:
            examples = min(self._most, total - done)
            part = inputs if examples == total else take(inputs, slice(done, done + examples))
            try:
                # A model may write to its input, and it may switch gradients on.
                parts.append(call_model(model, copy_of(part)).detach())
                done += examples
                continue
            except torch.OutOfMemoryError:
                if examples == 1:
                    raise
            # Outside the clause, whose error keeps the tensors of the pass.
            self._most = -(-examples // 2)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _takes_channels_last(model: nn.Module, inputs: Inputs) -> bool:
    """Return whether a model gives a few inputs the same scores if their channels are last, up to rounding.

    It does not if it writes through a view, or calls kernels that want another layout.
    """
    few = take(inputs, slice(SMALLEST_CHUNK))
    try:
        with AnyLayout():
            last = call_model(model, copy_of(with_channels_last(few))).detach()
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False
    plain = call_model(model, copy_of(few)).detach()
    return torch.allclose(last, plain, rtol=0, atol=ALIKE * float(plain.abs().max()), equal_nan=True)


class _FirstModel:
    """The score of the first model, from predictions that arrive in order; each loss is that of a whole batch."""

    def __init__(self, task: Task, metrics: Mapping[str, Metric], test: Examples, device: torch.device) -> None:
        self._task, self._metrics, self._examples, self._size = task, metrics, len(test), batch_on(device)
        self._parts: list[tuple[Tensor, Tensor]] = []
        self._all: list[tuple[Tensor, Tensor]] = []
        self._totals = ScoreSum(device)

    def add(self, scores: Tensor | None, targets: Tensor | None, hits: tuple[Tensor, Tensor] | None, end: int) -> None:
        """Add the predictions of the examples up to ``end``."""
        assert scores is not None
        assert targets is not None
        self._parts.append((scores, targets))
        if hits is not None:
            self._totals.add_hits(*hits)
        if end % self._size == 0 or end == self._examples:
            self._totals.add_loss(self._task.loss, *_joined(self._parts))
            self._parts = []
        if self._metrics:
            self._all.append((_host_copy(scores), _host_copy(targets)))

    def score(self) -> Score:
        """Return the score with the metrics."""
        score = self._totals.score()  # this also waits for the copies
        if not self._metrics:
            return score
        return replace(score, metrics=measure(self._metrics, self._task, *_joined(self._all)))


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU; the copy from a GPU is complete when its stream is."""
    if not tensor.is_cuda:
        return tensor.cpu()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _joined(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([scores for scores, _ in parts]), torch.cat([targets for _, targets in parts])


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
