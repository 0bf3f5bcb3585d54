"""The numbers of a record that callbacks compare and log."""

from difflib import get_close_matches

from fedcover.errors import InputError
from fedcover.federation.callbacks.base import RunView
from fedcover.federation.history import RoundRecord

NUMBERS = (
    "accuracy", "loss", "local_accuracy", "train_loss", "gamma_min", "uncovered", "pruning_noise", "pruning_noise_max",
    "norm2", "macs", "bytes_down", "bytes_up",
)  # fmt: skip
"""The fields of a record that are single numbers."""
OF_EVALUATION = ("accuracy", "loss", "local_accuracy")
"""Those that need a test set."""
BETTER = {
    "min": (
        "loss", "train_loss", "perplexity", "rmse", "mse", "mae", "error", "uncovered", "pruning_noise",
        "pruning_noise_max", "bytes_down", "bytes_up", "macs",
    ),
    "max": ("accuracy", "local_accuracy", "f1", "auc", "r2", "precision", "recall", "gamma_min", "top5"),
}  # fmt: skip
"""The metrics of which it is known whether less or more is better."""


def numbers_of(record: RoundRecord) -> dict[str, float | None]:
    """Return the numbers of a record by name; None where the round was not evaluated."""
    numbers: dict[str, float | None] = {name: getattr(record, name) for name in NUMBERS}
    numbers |= {name: value for name, value in record.metrics.items() if name not in numbers}
    return numbers | {"rejected": len(record.rejected), "seconds": sum(record.seconds.values())}


def measured_numbers(record: RoundRecord) -> dict[str, float]:
    """Return the numbers of a record by name, without those that were not measured."""
    return {name: value for name, value in numbers_of(record).items() if value is not None}


def metric_of(record: RoundRecord, metric: str) -> float | None:
    """Return a metric of a record; None if the round was not evaluated.

    Raises:
        InputError: If the record of an evaluated round does not have it.
    """
    numbers = numbers_of(record)
    if metric not in numbers and record.loss is not None:
        raise InputError(f"metric '{metric}' is not in the records; use one of {', '.join(numbers)}")
    if metric == "accuracy" and record.accuracy is None and record.loss is not None:
        raise InputError("accuracy is not measured for this task, whose targets are values; use loss, or a metric")
    return numbers.get(metric)


def better(metric: str, mode: str) -> str:
    """Return "min" if less of a metric is better, and "max" if more is.

    Raises:
        InputError: If the mode is neither, or it is empty and the metric is not a known one.

    >>> better("loss", ""), better("my_score", "max")
    ('min', 'max')
    """
    usual = next((name for name, metrics in BETTER.items() if metric in metrics), "")
    if mode not in ("min", "max") and not (mode == "" and usual):
        metrics = [*BETTER["max"], *BETTER["min"]]
        near = get_close_matches(metric, metrics, n=1) if mode == "" else []
        hint = f"; or did you mean the metric '{near[0]}'?" if near else ""
        raise InputError(f"mode must be 'min' or 'max', what is better for metric '{metric}'; got {mode!r}{hint}")
    return mode or usual


def check_metric(run: RunView, metric: str) -> None:
    """Raise InputError if a run cannot measure a metric."""
    if run.test is None and metric not in (*(set(NUMBERS) - set(OF_EVALUATION)), "rejected", "seconds"):
        raise InputError(f"metric '{metric}' needs a test set; pass evaluate_on, or use train_loss")
