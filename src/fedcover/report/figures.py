"""The figures of a report, with their names, titles and captions."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.report import format as cells
from fedcover.report.costs import cost_figure
from fedcover.report.coverage_map import coverage_figure
from fedcover.report.curves import (
    accuracy_by_megabytes_figure,
    accuracy_figure,
    gamma_min_figure,
    loss_figure,
    measured,
    pruning_noise_figure,
)
from fedcover.report.loading import AnyPath, LoadedRun, numbered, open_runs
from fedcover.report.measures import measure
from fedcover.report.svg import FORMATS, file_bytes

_COVERAGE = (
    "Each row is a parameter tensor, each column a round; the shade is the coverage (number of clients of the round "
    "that held it) of the tensor's least-held entry. Look for orange: entries that no client held in that round, so "
    "that they kept their old values."
)


@dataclass(frozen=True)
class Drawing:
    """A figure with its texts, which are plain text."""

    name: str
    """File name without the suffix; unique among the figures of a report."""
    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]


def drawings(runs: Sequence[LoadedRun]) -> list[Drawing]:
    """Return the figures of one run, or of several compared, in reading order; those without data are left out."""
    figures = [
        *_accuracy_drawings(runs),
        *_loss_drawings(runs),
        _gamma_min_drawing(runs),
        _pruning_noise_drawing(runs),
        _cost_drawing(runs),
    ]
    return [*figures, *_coverage_drawings(runs)]


def _accuracy_drawings(runs: Sequence[LoadedRun]) -> list[Drawing]:
    if not any(measured(run, "accuracy")[0] for run in runs):
        return []
    several = len(runs) > 1
    over_rounds = Drawing(
        "accuracy",
        "Accuracy",
        "Share of examples classified correctly: the global model on the test set"
        + ("." if several else ", and, where it was measured, the mean over clients (local).")
        + " Look for how early the curve flattens, and for dips after rounds of low coverage.",
        f"Line chart of accuracy over rounds; at the end {_ends(runs, 'accuracy')}",
        partial(accuracy_figure, runs),
    )
    if not several:
        return [over_rounds]
    over_traffic = Drawing(
        "accuracy-by-megabytes",
        "Accuracy against traffic",
        "The same accuracy against all bytes sent so far, down and up. Look for the curve furthest to the upper left: "
        "it reaches the most accuracy with the fewest bytes.",
        f"Line chart of accuracy against megabytes sent; at the end {_ends(runs, 'accuracy')}",
        partial(accuracy_by_megabytes_figure, runs),
    )
    return [over_rounds, over_traffic]


def _loss_drawings(runs: Sequence[LoadedRun]) -> list[Drawing]:
    several = len(runs) > 1
    columns = ("loss",) if several else ("loss", "train_loss")
    if not any(measured(run, column)[0] for run in runs for column in columns):
        return []
    drawing = Drawing(
        "loss",
        "Loss",
        "Loss of the global model on the test set"
        + ("." if several else ", and mean loss of the clients over their last local epoch (training).")
        + " Look for a test loss that rises while accuracy is constant: the model becomes overconfident.",
        f"Line chart of loss over rounds; at the end {_ends(runs, 'loss')}",
        partial(loss_figure, runs),
    )
    return [drawing]


def _gamma_min_drawing(runs: Sequence[LoadedRun]) -> Drawing:
    return Drawing(
        "gamma-min",
        "Least coverage Γmin",
        "Γmin is the number of clients that held the least-held entry of the whole model in a round. Higher is "
        "safer: pruning noise weighs less in the bound on convergence. Look for drops, and for orange points at 0.",
        f"Step chart of least coverage over rounds; over all rounds {_ends(runs, 'gamma_min')}",
        partial(gamma_min_figure, runs),
    )


def _pruning_noise_drawing(runs: Sequence[LoadedRun]) -> Drawing:
    return Drawing(
        "pruning-noise",
        "Pruning noise δ²",
        "δ² = ‖θ − θ∘m‖² / ‖θ‖² is the share of the model's squared norm that a client's mask m removes. The line "
        "is the mean over the round's clients"
        + (", the band runs from the smallest to the largest." if len(runs) <= 4 else ".")
        + ("" if len(runs) > 1 else " Each point is a client.")
        + " Look for masks that remove more as training proceeds.",
        f"Line chart of pruning noise over rounds; its mean is {_ends(runs, 'pruning_noise')}",
        partial(pruning_noise_figure, runs),
    )


def _cost_drawing(runs: Sequence[LoadedRun]) -> Drawing:
    return Drawing(
        "costs",
        "Costs against full models",
        "Totals of the run as a share of the same run with full models; the pale bar is 100 %. Bytes count both "
        "directions; multiply-adds are those of one example's forward pass.",
        f"Bar chart of costs as a share of full models; bytes sent {_ends(runs, 'bytes_share')}",
        partial(cost_figure, runs),
    )


def _coverage_drawings(runs: Sequence[LoadedRun]) -> list[Drawing]:
    most = max(len(record.cohort) for run in runs for record in run.history)
    mapped = [pair for pair in zip(runs, slugs([r.name for r in runs]), strict=True) if _has_layers(pair[0])]
    return [
        Drawing(
            f"coverage-{name}",
            f"Coverage by layer: {run.name}" if len(runs) > 1 else "Coverage by layer",
            _COVERAGE if number == 0 else "The same map for this run, on the same scale.",
            f"Map of least coverage by tensor and round; {_ends([run], 'gamma_min')} over all",
            partial(coverage_figure, run, most),
        )
        for number, (run, name) in enumerate(mapped)
    ]


def export_figures(
    runs: Iterable[LoadedRun | AnyPath], folder: str | os.PathLike[str], formats: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """Write every figure of the report in every format, such as ``accuracy.svg``; return the files.

    Args:
        runs: Runs, or the folders of runs.
        folder: Where the files go.
        formats: Any of svg, png and pdf.

    Raises:
        InputError: If a format is unknown or a folder is not a run folder.

    >>> export_figures(["runs/wp"], "figures", formats=["pdf"])[0]  # doctest: +SKIP
    PosixPath('figures/accuracy.pdf')
    """
    return write_drawings(drawings(open_runs(runs)), folder, formats)


def write_drawings(
    drawings: Sequence[Drawing], folder: str | os.PathLike[str], formats: Sequence[str] = ("svg", "png")
) -> list[Path]:
    """Write every drawing in every format; return the files."""
    kinds = [formats] if isinstance(formats, str) else list(formats)
    for kind in kinds:
        if kind not in FORMATS:
            raise InputError(f"figure format {kind!r} is unknown; use one of {', '.join(FORMATS)}")
    written = []
    for drawing in drawings:
        figure = drawing.draw()
        written += [
            write_atomically(Path(folder) / f"{drawing.name}.{kind}", file_bytes(figure, kind)) for kind in kinds
        ]
    return written


def slugs(names: Sequence[str]) -> list[str]:
    """Return names as plain, distinct parts of file names."""
    return numbered([re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "run" for name in names], mark="-")


def _has_layers(run: LoadedRun) -> bool:
    return any(record.coverage for record in run.history)


def _ends(runs: Sequence[LoadedRun], name: str) -> str:
    """Describe one number of each run, for readers who cannot see the figure."""
    kinds: dict[str, Callable[..., str]] = {"loss": cells.decimal, "pruning_noise": cells.decimal, "gamma_min": str}
    words = []
    for run in runs:
        value = getattr(measure(run.history), name)
        text = "not measured" if value is None else kinds.get(name, cells.percent)(value)
        words.append(f"{run.name} {text}" if len(runs) > 1 else text)
    return ", ".join(words)
