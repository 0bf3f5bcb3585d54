"""Totals, means and extremes of a whole run, computed from its history."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fedcover.federation.history import History, RoundRecord


@dataclass(frozen=True)
class Hole:
    """The layer with the largest uncovered share of any round, and that round."""

    layer: str
    round: int
    share: float
    """Share of the layer's entries that no client held in that round."""


@dataclass(frozen=True)
class Measures:
    """The numbers of a run; None where nothing was measured."""

    rounds: int
    accuracy: float | None
    """Accuracy at the last evaluated round, as are ``local_accuracy`` and ``loss``."""
    accuracy_round: int | None
    metrics: dict[str, float]
    """Each metric of the task at the last round in which it was evaluated; accuracy is one of them."""
    local_accuracy: float | None
    loss: float | None
    gamma_min: int
    clients: tuple[int, int]
    """The smallest and the largest cohort."""
    uncovered: float
    """The largest share of entries that no client held, over the rounds."""
    uncovered_rounds: int
    hole: Hole | None
    pruning_noise: float | None
    """Mean over rounds of the cohort's mean delta^2."""
    kept: float | None
    """Mean over rounds and clients of the share of entries held."""
    bytes_down: int
    bytes_up: int
    bytes_full: int
    bytes_share: float | None
    """Bytes down and up as a share of those with full models."""
    macs_share: float | None
    seconds: float
    rejected: int


def measure(history: History) -> Measures:
    """Return the numbers of a history of at least one round."""
    accuracy_round, accuracy = last_measured(history, "accuracy")
    cohorts = [len(record.cohort) for record in history]
    down, up, full = (sum(history.column(name)) for name in ("bytes_down", "bytes_up", "bytes_full"))
    return Measures(
        rounds=len(history),
        accuracy=accuracy,
        accuracy_round=accuracy_round,
        metrics=last_metrics(history),
        local_accuracy=last_measured(history, "local_accuracy")[1],
        loss=last_measured(history, "loss")[1],
        gamma_min=history.gamma_min,
        clients=(min(cohorts), max(cohorts)),
        uncovered=max(history.column("uncovered")),
        uncovered_rounds=sum(share > 0 for share in history.column("uncovered")),
        hole=_worst_hole(history),
        pruning_noise=mean(history.column("pruning_noise")),
        kept=mean(share for record in history for share in record.kept),
        bytes_down=down,
        bytes_up=up,
        bytes_full=full,
        bytes_share=_ratio(down + up, full),
        macs_share=_ratio(sum(history.column("macs")), sum(history.column("macs_full"))),
        seconds=sum(math.fsum(record.seconds.values()) for record in history),
        rejected=sum(len(record.rejected) for record in history),
    )


def last_measured(history: History, name: str) -> tuple[int | None, float | None]:
    """Return the last round in which the column was measured, and its value; (None, None) if never."""
    for record in reversed(history):
        value = getattr(record, name)
        if value is not None:
            return record.round, float(value)
    return None, None


def metrics_of(record: RoundRecord) -> dict[str, float]:
    """Return the metrics of a round by name; older records have only accuracy."""
    metrics: dict[str, float | None] = {"accuracy": record.accuracy, **record.metrics}
    return {name: float(value) for name, value in metrics.items() if value is not None}


def last_metrics(history: History) -> dict[str, float]:
    """Return each metric at the last round in which it was evaluated."""
    return {name: value for record in history for name, value in metrics_of(record).items()}


def metric_names(histories: Iterable[History]) -> list[str]:
    """Return the metrics that were evaluated in any round, accuracy first; only accuracy if there was no evaluation."""
    names = {name: None for history in histories for record in history for name in metrics_of(record)}
    return sorted(names, key=lambda name: name != "accuracy") or ["accuracy"]


def present(values: Iterable[float | None]) -> list[float]:
    """Return the values that were measured."""
    return [value for value in values if value is not None]


def mean(values: Iterable[float]) -> float | None:
    """Return the mean, or None if there are no values."""
    numbers = list(values)
    return math.fsum(numbers) / len(numbers) if numbers else None


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _worst_hole(history: History) -> Hole | None:
    """Return the largest uncovered share of any layer in any round; the first such round."""
    worst: Hole | None = None
    for record in history:
        for hole in _holes(record):
            if worst is None or hole.share > worst.share:
                worst = hole
    return worst


def _holes(record: RoundRecord) -> list[Hole]:
    return [Hole(name, record.round, layer.uncovered) for name, layer in record.coverage.items() if layer.uncovered > 0]
