"""Metrics: functions from the scores and targets of a whole test set to one number.

A metric of your own is any function ``(scores, targets) -> number``; it appears in records, on the console and on pages
under its name. Targets of -100 are left out by those of this file.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedcover.data.examples import IGNORED
from fedcover.errors import InputError
from fedcover.registry import Registry
from fedcover.training.targets import Decision, name_of

Metric = Callable[[Tensor, Tensor], float | Tensor]
"""A function from (scores, targets) of a whole test set to one number."""


def accuracy(scores: Tensor, targets: Tensor) -> float:
    """Return the share of right predictions: the class of the largest score, or for one logit its sign.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    0.5
    """
    predicted, truth = _predictions(scores, targets)
    return float((predicted == truth).double().mean())


def f1(scores: Tensor, targets: Tensor) -> float:
    """Return the F1 score: of class 1 for logits of targets 0 and 1, and the mean over classes otherwise.

    Logits of several labels are counted together (micro average). Classes that are neither predicted nor present are
    left out.

    >>> f1(torch.tensor([2.0, 1.0, -1.0]), torch.tensor([1, 0, 1]))
    0.5
    """
    predicted, truth = _predictions(scores, targets)
    classes = [1] if _one_score(scores, targets) else torch.cat([predicted, truth]).unique().tolist()
    return float(sum(_f1_of(predicted == label, truth == label) for label in classes) / max(1, len(classes)))


def auc(scores: Tensor, targets: Tensor) -> float:
    """Return the area under the ROC curve, as the share of (1, 0) pairs of targets whose scores are in order.

    Ties count half. For scores of two or more classes it is the mean over the classes that have both kinds of targets,
    each against the others.

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    0.75
    """
    if _one_score(scores, targets):
        counted = _counted(targets)
        areas = [_area(scores.flatten()[counted], targets.flatten()[counted] == 1)]
    else:
        flat, truth = scores.movedim(1, -1).reshape(-1, scores.shape[1]), targets.flatten()
        flat, truth = flat[truth != IGNORED], truth[truth != IGNORED]
        areas = [_area(flat[:, label], truth == label) for label in range(flat.shape[1])]
    defined = [area for area in areas if not math.isnan(area)]
    return sum(defined) / len(defined) if defined else math.nan


def perplexity(scores: Tensor, targets: Tensor) -> float:
    """Return exp of the mean cross-entropy of the targets.

    >>> round(perplexity(torch.zeros(1, 4, 3), torch.tensor([[0, 1, -100]])), 3)
    4.0
    """
    return math.exp(min(float(F.cross_entropy(scores.double(), targets)), 700.0))


def rmse(scores: Tensor, targets: Tensor) -> float:
    """Return the root of the mean squared error.

    >>> rmse(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0]))
    1.4142135623730951
    """
    values, truth = _values(scores, targets)
    return math.sqrt(float((values - truth).square().mean()))  # unlike torch, the same bits on every machine


def mae(scores: Tensor, targets: Tensor) -> float:
    """Return the mean absolute error."""
    values, truth = _values(scores, targets)
    return float((values - truth).abs().mean())


def r2(scores: Tensor, targets: Tensor) -> float:
    """Return the share of the targets' variance that the scores explain; 1 for perfect predictions."""
    values, truth = _values(scores, targets)
    if targets.is_floating_point():  # each column of targets has its own mean
        values, truth = values.reshape(targets.shape), truth.reshape(targets.shape)
    return float(1 - (values - truth).square().sum() / (truth - truth.mean(0)).square().sum())


PREDICTIONS = (accuracy, f1, auc)
"""The metrics that depend on which class is predicted."""
METRICS: Registry[float | Tensor] = Registry("metric")
"""The metrics by name."""
for _metric in (accuracy, f1, auc, perplexity, rmse, mae, r2):
    METRICS.register(_metric.__name__)(_metric)


def named_metrics(metrics: "Sequence[Metric | str] | Mapping[str, Metric | str] | Metric | str") -> dict[str, Metric]:
    """Return metrics by name; a text names one of ``METRICS``.

    >>> list(named_metrics(["f1", rmse]))
    ['f1', 'rmse']
    """
    if isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    if not isinstance(metrics, Mapping | Sequence):
        raise InputError(f"metrics must be functions or names of metrics; got {metrics!r}")
    if isinstance(metrics, Mapping):
        named = {name: METRICS.find(one)[1] if isinstance(one, str) else one for name, one in metrics.items()}
    else:
        resolved = [METRICS.find(one)[1] if isinstance(one, str) else one for one in metrics]
        named = {name_of(one): one for one in resolved}
        if len(named) < len(resolved):
            raise InputError("two metrics have the same name; pass them as a dict from name to function")
    for name, metric in named.items():
        if not callable(metric):
            raise InputError(f"metric '{name}' must be a function (scores, targets) -> number; got {metric!r}")
    return named


def default_metrics(decision: Decision | None, scores: Tensor, targets: Tensor) -> dict[str, Metric]:
    """Return the metrics for targets: accuracy for classes, with F1 for several labels, and RMSE for values."""
    if decision is None:
        return {"rmse": rmse} if scores.numel() == targets.numel() else {}
    several = decision.threshold is not None and targets[0].numel() > 1
    return {"f1": f1} if several else {}  # accuracy is measured for all classes


def _one_score(scores: Tensor, targets: Tensor) -> bool:
    """Return whether there is one score for each target."""
    return scores.numel() == targets.numel()


def _counted(targets: Tensor) -> Tensor:
    """Return which targets, flat, are not to be ignored; values are never ignored."""
    flat = targets.flatten()
    return torch.ones_like(flat, dtype=torch.bool) if targets.is_floating_point() else flat != IGNORED


def _predictions(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted classes and the targets, flat, without those to ignore."""
    predicted = (scores > 0).long() if _one_score(scores, targets) else scores.argmax(1)
    truth = targets.long().flatten()
    return predicted.flatten()[truth != IGNORED], truth[truth != IGNORED]


def _values(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores and the targets, flat, without those to ignore."""
    if scores.numel() != targets.numel():
        shapes = f"scores of shape {tuple(scores.shape)} and targets of shape {tuple(targets.shape)}"
        raise InputError(f"an error of values needs one score for each target; got {shapes}")
    counted = _counted(targets)
    return scores.flatten()[counted].double(), targets.flatten()[counted].double()


def _f1_of(predicted: Tensor, truth: Tensor) -> float:
    both = int((predicted & truth).sum())
    return 2 * both / max(1, int(predicted.sum()) + int(truth.sum()))


def _area(scores: Tensor, positive: Tensor) -> float:
    """Return the share of pairs in order, from the ranks of the positives; NaN without pairs."""
    positives, negatives = int(positive.sum()), int((~positive).sum())
    if not positives or not negatives:
        return math.nan
    values, place = scores.double().unique(return_inverse=True)
    counts = torch.bincount(place, minlength=len(values)).double()
    ranks = counts.cumsum(0) - (counts - 1) / 2
    return (float(ranks[place][positive].sum()) - positives * (positives + 1) / 2) / (positives * negatives)
