"""Measures of one run's outcome that comparisons use."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from fedcover_experiments.results import Outcome

LATE = 10
"""Rounds at the end over which loss and accuracy are averaged, so that the last cohort does not decide."""


def late_loss(outcome: Outcome) -> float:
    """Return the mean test loss of the last rounds."""
    return fmean(measured(outcome.loss)[-LATE:])


def late_accuracy(outcome: Outcome) -> float:
    """Return the mean accuracy of the last rounds, in percent."""
    return 100 * fmean(measured(outcome.accuracy)[-LATE:])


def whole_loss(outcome: Outcome) -> float:
    """Return the mean test loss of all rounds, which is lower for runs that converge faster."""
    return fmean(measured(outcome.loss))


def unsteadiness(outcome: Outcome) -> float:
    """Return the mean absolute change of accuracy per round in the second half, in points."""
    values = measured(outcome.accuracy)
    changes = [abs(after - before) for before, after in pairwise(values[max(0, len(values) // 2 - 1) :])]
    return 100 * fmean(changes) if changes else 0.0


def measured(values: Sequence[float | None]) -> list[float]:
    """Return the values of the rounds in which the model was evaluated."""
    return [value for value in values if value is not None]


ACCURACY = "accuracy, %"
MEASURES: dict[str, tuple[Callable[[Outcome], float], int]] = {
    "loss": (late_loss, 4),
    ACCURACY: (late_accuracy, 2),
    "loss over all rounds": (whole_loss, 4),
    "change per round, points": (unsteadiness, 3),
}
"""The function that computes each measure, and the digits that reports show."""
