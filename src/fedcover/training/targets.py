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

Loss = Callable[[Tensor, Tensor], Tensor]
"""A function from (scores, targets) to the mean loss over the batch."""
CLOSE = 1e-5


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


def fit_loss(loss: Loss, scores: Tensor, targets: Tensor) -> Loss:
    """Return the loss itself if it takes these targets, or else one that brings them into the form that it takes.

    Whole numbers are class numbers or values, as the loss asks for, and a column is also a flat list.

    Args:
        loss: The loss.
        scores: The scores of a few examples.
        targets: Their targets.

    Raises:
        InputError: If the loss takes none of these forms, or does not return one number.

    >>> fitted = fit_loss(torch.nn.functional.mse_loss, torch.zeros(3, 1), torch.tensor([1, 1, 1]))
    >>> float(fitted(torch.zeros(3, 1), torch.tensor([1, 1, 1])))
    1.0
    """
    problem = ""
    for candidate in _forms(loss, scores, targets):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns of targets that it would broadcast to another shape
                value = candidate(scores, targets)
        except MemoryError:
            raise
        except Exception as error:
            problem = problem or str(error).strip().partition("\n")[0]
            continue
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            got = f"the shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InputError(f"the loss {name_of(loss)} must return the mean over the batch, one number; got {got}")
        if _depends_on_scores(candidate, scores, targets):
            return candidate
        problem = problem or "its gradient is 0 whatever the scores are, so that nothing would be trained"
    raise InputError(
        f"the loss {name_of(loss)} does not take scores of shape {tuple(scores.shape)} and labels of shape"
        f" {tuple(targets.shape)} and type {targets.dtype}: {problem}; give labels in the form that the loss takes, or"
        f" a loss that takes these"
    )


def _depends_on_scores(loss: Loss, scores: Tensor, targets: Tensor) -> bool:
    """Return whether some scores have a gradient; cross-entropy of a single class has none, for example."""
    if not targets.is_floating_point() and bool((targets == IGNORED).all()):
        return True
    rng = generator(0, "scores")
    with torch.enable_grad():
        for draw in (scores, *(torch.randn(scores.shape, generator=rng).to(scores) for _ in range(3))):
            at = draw.detach().clone().requires_grad_()
            try:
                (gradient,) = torch.autograd.grad(loss(at, targets), [at])
            except Exception:  # such as a loss that takes only probabilities, or cannot be differentiated twice
                continue
            if bool(gradient.any()):
                return True
    return False


def _forms(loss: Loss, scores: Tensor, targets: Tensor) -> Iterator[Loss]:
    """Yield the loss with targets in their own form, and in others with the same meaning."""
    yield loss
    if class_axis(scores, targets) == -1:
        yield FittedLoss(loss, classes_last=True)
    reshapes = targets.shape != scores.shape and targets.numel() == scores.numel()
    dtypes: list[torch.dtype | None] = [None]
    if targets.dtype != scores.dtype:
        dtypes.append(scores.dtype)
    for dtype in dtypes:
        for as_scores in (True, False) if reshapes else (False,):
            if dtype is not None or as_scores:
                yield FittedLoss(loss, dtype, as_scores)
    whole = not targets.is_floating_point() or bool((targets == targets.round()).all())
    if whole:
        yield FittedLoss(loss, torch.int64)
        if targets.ndim == 2 and targets.shape[1] == 1:
            yield FittedLoss(loss, torch.int64, flat=True)


def class_axis(scores: Tensor, targets: Tensor) -> int | None:
    """Return the axis of the scores that has the classes, 1 or -1; None if there is no score for each class.

    >>> class_axis(torch.zeros(2, 9, 5), torch.zeros(2, 5)), class_axis(torch.zeros(2, 5, 9), torch.zeros(2, 5))
    (1, -1)
    """
    if scores.ndim != targets.ndim + 1:
        return None
    if scores.shape[2:] == targets.shape[1:]:
        return 1
    return -1 if scores.shape[:-1] == targets.shape else None


@dataclass(frozen=True)
class Decision:
    """The class that scores predict: that of the largest score, or for one score whether it is above a threshold."""

    threshold: float | None = None
    """None for the class of the largest score."""
    axis: int = 1
    """The axis of the scores that has the classes."""

    def __call__(self, scores: Tensor) -> Tensor:
        """Return the predicted class numbers."""
        return scores.argmax(self.axis) if self.threshold is None else (scores > self.threshold).long()


def decision_of(loss: Loss, scores: Tensor, targets: Tensor) -> Decision | None:
    """Return what scores predict; None if the targets are values, so that there is no right or wrong.

    For scores of two or more classes it is the class of the largest score. For one score per target, with targets of 0
    and 1, it is the target with the smaller loss: the threshold between them is at 0 for logits and at 0.5 for
    probabilities.

    Args:
        loss: The loss, from ``fit_loss``.
        scores: The scores of a few examples.
        targets: Their targets.

    >>> decision_of(torch.nn.functional.binary_cross_entropy, torch.full((2,), 0.1), torch.tensor([0.0, 1.0]))
    Decision(threshold=0.5, axis=1)
    """
    axis = class_axis(scores, targets)
    if not targets.is_floating_point() and axis is not None and scores.shape[axis] > 1:
        return Decision(axis=axis)
    if scores.numel() != targets.numel() or not bool(((targets == 0) | (targets == 1)).all()):
        return None
    for threshold in (0.0, 0.5):
        at = torch.full_like(scores, threshold)
        try:
            zero, one = (float(loss(at, torch.full_like(targets, value))) for value in (0, 1))
        except Exception:  # such as a loss that takes only probabilities
            continue
        if abs(zero - one) <= CLOSE * max(abs(zero), abs(one), 1e-30):
            return Decision(threshold)
    return None


def hits_of(decision: Decision, scores: Tensor, targets: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return the number of right predictions and of targets in each class, without targets to ignore."""
    predicted = decision(scores).reshape(targets.shape).flatten()
    truth = targets.long().flatten()
    counted = truth != IGNORED
    weight = counted.double()
    truth = torch.where(counted, truth, 0)
    zeros = torch.zeros(classes, dtype=torch.float64, device=truth.device)
    right = zeros.index_add(0, truth, weight * (predicted == truth))
    return right, zeros.index_add(0, truth, weight)


def fitted_targets(loss: Any, scores: Tensor, targets: Tensor) -> Tensor:
    """Return targets in the form that a loss takes."""
    return loss.fit(scores, targets) if isinstance(loss, FittedLoss) else targets
