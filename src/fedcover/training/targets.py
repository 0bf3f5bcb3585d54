"""How a loss takes the targets of a data set, and what its scores predict."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcover.data.examples import IGNORED
from fedcover.errors import InputError
from fedcover.seeding import generator
from fedcover.structure.calls import first_line

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function from (scores, targets) to the mean loss over the batch."""
CLOSE = 1e-5
DRAWS: tuple[tuple[Callable[..., Tensor], float], ...] = ((torch.rand, 1.0), (torch.randn, 1.0), (torch.randn, 10.0))
"""The random scores with which a loss is tried, and their scales; some are also probabilities."""


@dataclass(frozen=True)
class FittedLoss:
    """A loss whose targets are first brought into the form that it takes."""

    loss: Loss
    dtype: torch.dtype | None = None
    """The type of the targets; None for their own."""
    as_scores: bool = False
    """Whether targets get the shape of the scores, as (N,) becomes (N, 1)."""
    flat: bool = False
    """Whether targets of one column lose it, as (N, 1) becomes (N,)."""
    classes_last: bool = False
    """Whether the classes are the last axis of the scores, as for language models; the loss gets them as axis 1."""

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the loss."""
        targets = self.fit(scores, targets)
        return self.loss(scores.movedim(-1, 1) if self.classes_last else scores, targets)

    def fit(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return targets in the form that the loss takes."""
        if self.dtype is not None:
            targets = targets.to(self.dtype)
        if self.as_scores:
            return targets.reshape(scores.shape)
        return targets.squeeze(1) if self.flat else targets

    @property
    def __name__(self) -> str:
        return name_of(self.loss)


def name_of(function: object) -> str:
    """Return the name of a function or of an object's class, for messages.

    >>> name_of(torch.nn.BCELoss())
    'BCELoss'
    """
    return getattr(function, "__name__", None) or type(function).__name__


def fit_loss(loss: Loss, scores: Tensor, targets: Tensor, whole: bool = True, classes_last: bool = False) -> Loss:
    """Return the loss itself if it takes these targets, or else one that brings them into the form that it takes.

    Whole numbers are class numbers or values, as the loss asks for, and a column is also a flat list. A form in which
    the loss does not depend on the scores, or not on which target belongs to which score, is not taken: cross-entropy
    of a single class is always 0, and the squared error of scores (N, 1) and targets (N,) is a mean over all pairs.

    Args:
        loss: The loss.
        scores: The scores of a few examples.
        targets: Their targets, which should differ.
        whole: Whether all targets of the data set are whole numbers.
        classes_last: Whether the model has its classes as the last axis of its scores, where both axes are possible.

    Raises:
        InputError: If the loss takes none of these forms, or does not return one number.

    >>> fitted = fit_loss(torch.nn.functional.mse_loss, torch.zeros(2, 1), torch.tensor([1, 2]))
    >>> float(fitted(torch.zeros(2, 1), torch.tensor([1, 2])))
    2.5
    """
    problem = ""
    for candidate in _forms(loss, scores, targets, whole, classes_last):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns of targets that it would broadcast to another shape
                value = candidate(scores, targets)
        except MemoryError:
            raise
        except Exception as error:
            problem = problem or first_line(error)
            continue
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            got = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(f"the loss {name_of(loss)} must return the mean over the batch, one number; got {got}")
        fault = _fault(candidate, scores, targets)
        if not fault:
            return candidate
        problem = fault
    raise InputError(
        f"the loss {name_of(loss)} does not take scores of shape {tuple(scores.shape)} and labels of shape"
        f" {tuple(targets.shape)} and type {targets.dtype}: {problem}; give labels in the form that the loss takes, or"
        f" a loss that takes these"
    )


def _fault(loss: Loss, scores: Tensor, targets: Tensor) -> str:
    """Return why a loss cannot be trained with these targets; an empty string if it can."""
    if not targets.is_floating_point() and bool((targets == IGNORED).any()):
        return ""
    results = list(_gradients(loss, scores, targets))
    if not results:
        return ""  # a loss that no random scores fit; it accepted the model's own
    if not any(bool(gradient.any()) for _, _, gradient in results):
        return "its gradient is 0 whatever the scores are, so that nothing would be trained"
    if all(_is_sum(loss, at, value, targets) for at, value, _ in results):
        return "it is a sum over the batch and not the mean"
    fitted = fitted_targets(loss, scores, targets)
    soft = fitted.is_floating_point() and fitted.shape == scores.shape and fitted.ndim > 1 and fitted.shape[1] > 1
    if soft and not _is_distribution(scores, fitted) and _is_softmax(loss, scores, targets, 1):
        return "its labels are not probabilities of the classes, which add up to 1; for several labels use BCE"
    may_broadcast = fitted.shape != scores.shape and _without_ones(fitted) == _without_ones(scores)
    if not may_broadcast or bool((targets[0] == targets[1]).all()):
        return ""
    swapped = targets.flip(0)
    pairs = [(value, loss(at, swapped)) for at, value, _ in results]
    if all(bool(torch.isclose(a, b, rtol=1e-6, atol=0.0)) for a, b in pairs):
        return "it does not depend on which label belongs to which score, as if it compared all pairs of them"
    return ""


def _is_sum(loss: Loss, scores: Tensor, value: Tensor, targets: Tensor) -> bool:
    """Return whether the loss of a batch that is repeated is twice as large."""
    try:
        twice = loss(torch.cat([scores, scores]), torch.cat([targets, targets]))
    except Exception:  # such as a loss for batches of one size
        return False
    return bool(value != 0) and bool(torch.isclose(twice, 2 * value, rtol=1e-5))


def _gradients(loss: Loss, scores: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield random scores, the loss there, and its gradient."""
    rng = generator(0, "scores")
    for draw, scale in DRAWS:
        at = (draw(scores.shape, generator=rng) * scale).to(scores).requires_grad_()
        try:
            with torch.enable_grad():
                value = loss(at, targets)
                (gradient,) = torch.autograd.grad(value, [at])
        except Exception:  # such as a loss that takes only some scores
            continue
        if bool(value.isfinite()):
            yield at.detach(), value.detach(), gradient


def _forms(loss: Loss, scores: Tensor, targets: Tensor, whole: bool, classes_last: bool) -> Iterator[Loss]:
    """Yield the loss with targets in their own form, and in others with the same meaning."""
    axes = class_axes(scores, targets)
    if axes == [1, -1] and classes_last and not targets.is_floating_point():
        yield FittedLoss(loss, classes_last=True)
    yield loss
    if axes == [-1]:
        yield FittedLoss(loss, classes_last=True)
    reshapes = targets.shape != scores.shape and _without_ones(targets) == _without_ones(scores)
    dtypes: list[torch.dtype | None] = [None]
    if targets.dtype != scores.dtype:
        dtypes.append(scores.dtype)
    for dtype in dtypes:
        for as_scores in (True, False) if reshapes else (False,):
            if dtype is not None or as_scores:
                yield FittedLoss(loss, dtype, as_scores)
    if whole:
        yield FittedLoss(loss, torch.int64)
        if targets.ndim == 2 and targets.shape[1] == 1:
            yield FittedLoss(loss, torch.int64, flat=True)


def _without_ones(tensor: Tensor) -> list[int]:
    """Return the shape of one row without axes of size 1."""
    return [size for size in tensor.shape[1:] if size != 1]


def class_axes(scores: Tensor, targets: Tensor) -> list[int]:
    """Return the axes of the scores that may have the classes, 1 or -1; none if there is no score for each class.

    >>> class_axes(torch.zeros(2, 9, 5), torch.zeros(2, 5)), class_axes(torch.zeros(2, 5, 9), torch.zeros(2, 5))
    ([1], [-1])
    """
    if scores.ndim != targets.ndim + 1:
        return []
    axes = [1] if scores.shape[2:] == targets.shape[1:] else []
    return [*axes, -1] if scores.ndim > 2 and scores.shape[:-1] == targets.shape else axes


@dataclass(frozen=True)
class Decision:
    """The class that scores predict: that of the largest score, or for one score whether it is above a threshold."""

    threshold: float | None = None
    """None for the class of the largest score."""
    axis: int = 1
    """The axis of the scores that has the classes."""
    soft: bool = False
    """Whether targets have a probability for each class, of which the largest is the true one."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the predicted class numbers."""
        return scores.argmax(self.axis) if self.threshold is None else (scores > self.threshold).long()

    def truth(self, targets: Tensor) -> Tensor:
        """Return the true class numbers."""
        return targets.argmax(self.axis) if self.soft else targets.long()


def decision_of(loss: Loss, scores: Tensor, targets: Tensor, binary: bool = True) -> Decision | None:
    """Return what scores predict; None if the targets are values, so that there is no right or wrong.

    For scores of two or more classes it is the class of the largest score. For one score per target, with targets of 0
    and 1, it is the target with the smaller loss: the threshold between them is at 0 for logits and at 0.5 for
    probabilities.

    Args:
        loss: The loss, from ``fit_loss``.
        scores: The scores of a few examples.
        targets: Their targets.
        binary: Whether all targets of the data set are 0 or 1, or to be ignored.

    >>> decision_of(torch.nn.functional.binary_cross_entropy, torch.full((2,), 0.1), torch.tensor([0.0, 1.0])).threshold
    0.5
    """
    fitted = fitted_targets(loss, scores, targets)
    axes = class_axes(scores, fitted) if not fitted.is_floating_point() else []
    axes = [axis for axis in axes if scores.shape[axis] > 1]
    if len(axes) > 1:
        axes = [-1] if isinstance(loss, FittedLoss) and loss.classes_last else axes
        axes = [axis for axis in axes if _is_softmax(loss, scores, targets, axis)] or axes
    if axes:
        return Decision(axis=axes[0])
    if fitted.is_floating_point() and _is_distribution(scores, fitted) and _is_softmax(loss, scores, targets, 1):
        return Decision(soft=True)
    if not binary or _without_ones(scores) != _without_ones(fitted):
        return None
    counted = targets != IGNORED
    for threshold in (0.0, 0.5):
        at = torch.full_like(scores, threshold)
        try:
            zero, one = (float(loss(at, torch.where(counted, value, targets).to(targets))) for value in (0, 1))
        except Exception:  # such as a loss that takes only probabilities
            continue
        if abs(zero - one) <= CLOSE * max(abs(zero), abs(one), 1e-30):
            return Decision(threshold)
    return None


def _is_softmax(loss: Loss, scores: Tensor, targets: Tensor, axis: int) -> bool:
    """Return whether only differences of scores along an axis matter, as for the classes of a softmax."""
    gradients = [gradient for _, _, gradient in _gradients(loss, scores, targets)]
    sums = [gradient.sum(axis).abs().max() / gradient.abs().max().clamp_min(1e-30) for gradient in gradients]
    return bool(sums) and all(float(share) < 1e-4 for share in sums)


def _is_distribution(scores: Tensor, targets: Tensor) -> bool:
    """Return whether targets have a probability for each of several classes, along axis 1."""
    if targets.shape != scores.shape or targets.ndim < 2 or targets.shape[1] < 2:
        return False
    return bool((targets >= 0).all()) and bool(torch.isclose(targets.sum(1), targets.new_ones(()), atol=1e-3).all())


def hits_of(decision: Decision, scores: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the number of right predictions and of targets in each class, without targets to ignore."""
    truth = decision.truth(targets)
    predicted, truth = decision(scores).reshape(truth.shape).flatten(), truth.flatten()
    counted = truth != IGNORED
    weight = counted.double()
    truth = torch.where(counted, truth, 0)
    zeros = torch.zeros(classes, dtype=torch.float64, device=truth.device)
    right = zeros.index_add(0, truth, weight * (predicted == truth))
    return right, zeros.index_add(0, truth, weight)


def fitted_targets(loss: Any, scores: Tensor, targets: Tensor) -> Tensor:
    """Return targets in the form that a loss takes."""
    return loss.fit(scores, targets) if isinstance(loss, FittedLoss) else targets
