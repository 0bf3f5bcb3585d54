"""Measures of one run's outcome that comparisons use."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean

from fedcover_experiments.results import Outcome

LATE = 10
"""Rounds at the end over which loss and accuracy are averaged, so that the last cohort does not decide."""


def late_loss(outcome: Outcome) -> float:
    """Test loss over the last rounds."""
    return fmean(known(outcome.loss)[-LATE:])


def late_accuracy(outcome: Outcome) -> float:
    """Accuracy over the last rounds, in percent."""
    return 100 * fmean(known(outcome.accuracy)[-LATE:])


def whole_loss(outcome: Outcome) -> float:
    """Test loss over all rounds: the lower, the faster."""
    return fmean(known(outcome.loss))


def unsteadiness(outcome: Outcome) -> float:
    """How much accuracy moves from round to round in the second half, in points."""
    values = known(outcome.accuracy)
    changes = [abs(after - before) for before, after in pairwise(values[max(0, len(values) // 2 - 1) :])]
    return 100 * fmean(changes) if changes else 0.0


def known(values: Sequence[float | None]) -> list[float]:
    """The values of the rounds that were looked at."""
    return [value for value in values if value is not None]


ACCURACY = "accuracy, %"
MEASURES: dict[str, tuple[Callable[[Outcome], float], int]] = {
    "loss": (late_loss, 4),
    ACCURACY: (late_accuracy, 2),
    "loss over all rounds": (whole_loss, 4),
    "change a round, points": (unsteadiness, 3),
}
"""How each measure is taken, and the digits that it is shown with."""
