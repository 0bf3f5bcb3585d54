"""The figures of a report, with their names, titles and captions."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.report import format as cells
from fedcover.report.costs import cost_figure
from fedcover.report.coverage_map import coverage_figure
from fedcover.report.curves import (
    MOST_BANDS,
    accuracy_by_megabytes_figure,
    column,
    gamma_min_figure,
    loss_figure,
    measured,
    metric,
    metric_figure,
    pruning_noise_figure,
)
from fedcover.report.loading import AnyPath, LoadedRun, numbered, open_runs
from fedcover.report.measures import mean, metric_names
from fedcover.report.methods import MethodRuns, group_runs, has_seeds
from fedcover.report.svg import FORMATS, file_bytes
from fedcover.report.table import HIGHER_IS_BETTER, LOWER_IS_BETTER

MOST_MAPS = 8
"""The most maps of coverage in a report; more would make its page too large."""
_COVERAGE = (
    "Each row is a parameter tensor, each column a round; the shade is the coverage (number of clients of the round "
    "that held it) of the tensor's least-held entry. Look for orange: entries that no client held in that round, so "
    "that they kept their old values."
)


@dataclass(frozen=True)
class LegendEntry:
    """A series in a legend."""

    series: str
    style: int
    """The number of its colour and dashes."""
    label: str


@dataclass(frozen=True)
class Drawing:
    """A figure with its texts, which are plain text."""

    name: str
    """File name without the suffix; unique among the figures of a report."""
    title: str
    caption: str
    alt: str
    draw: Callable[[], Figure]
    legend: Sequence[LegendEntry] = ()
    """The series of this figure, if a page shows them beside it and not once for all figures."""
    series: str = ""
    """The series that the whole figure shows, if there is only one."""


def drawings(methods: Sequence[MethodRuns]) -> list[Drawing]:
    """Return the figures of one run, or of several methods, in reading order; those without data are left out."""
    figures = [
        *_metric_drawings(methods),
        *_loss_drawings(methods),
        _gamma_min_drawing(methods),
        _pruning_noise_drawing(methods),
        _cost_drawing(methods),
        *_coverage_drawings(methods),
    ]
    names = numbered([drawing.name for drawing in figures], mark="-")
    return [replace(drawing, name=name) for drawing, name in zip(figures, names, strict=True)]


def _metric_drawings(methods: Sequence[MethodRuns]) -> list[Drawing]:
    runs = [run for method in methods for run in method.runs]
    figures = []
    for name in metric_names(run.history for run in runs):
        if not any(measured(run, metric(name)) for run in runs):
            continue
        figures.append(_metric_drawing(methods, name))
        if len(methods) > 1 and len(figures) == 1:
            figures.append(
                Drawing(
                    f"{_slug(name)}-by-megabytes",
                    f"{cells.heading(name)} against traffic",
                    f"The same {name} against all bytes sent so far, down and up. A curve further to the left needs "
                    "fewer bytes for the same value.",
                    f"Line chart of {name} against megabytes sent; at the end {_ends(methods, name)}",
                    partial(accuracy_by_megabytes_figure, methods, name),
                )
            )
    return figures


def _metric_drawing(methods: Sequence[MethodRuns], name: str) -> Drawing:
    single = len(methods) == 1 and len(methods[0].runs) == 1
    what = f"{cells.heading(name)} of the global model on the test set"
    if name == "accuracy":
        what = "Share of examples classified correctly: the global model on the test set"
        what += ", and, where it was measured, the mean over clients (local)" if single else ""
    worse = "dips" if name in HIGHER_IS_BETTER else "peaks" if name in LOWER_IS_BETTER else "jumps"
    hint = f"how early the curve flattens, and for {worse} after rounds of low coverage"
    return Drawing(
        _slug(name),
        cells.heading(name),
        f"{what}.{_band(methods)} Look for {hint}.",
        f"Line chart of {name} over rounds; at the end {_ends(methods, name)}",
        partial(metric_figure, methods, name),
    )


def _band(methods: Sequence[MethodRuns]) -> str:
    """Return a sentence on what curves and bands are, if there are several seeds."""
    if not has_seeds(methods):
        return ""
    band = ", the band is mean ± standard deviation" if len(methods) <= MOST_BANDS else ""
    return f" The line is the mean over seeds{band}, in rounds that all seeds of a method have reached."


def _loss_drawings(methods: Sequence[MethodRuns]) -> list[Drawing]:
    runs = [run for method in methods for run in method.runs]
    columns = ("loss",) if len(runs) > 1 else ("loss", "train_loss")
    if not any(measured(run, column(name)) for run in runs for name in columns):
        return []
    drawing = Drawing(
        "loss",
        "Loss",
        "Loss of the global model on the test set"
        + ("." if len(runs) > 1 else ", and mean loss of the clients over their last local epoch (training).")
        + _band(methods)
        + " Look for a test loss that rises while the metrics are constant: the model becomes overconfident.",
        f"Line chart of loss over rounds; at the end {_ends(methods, 'loss')}",
        partial(loss_figure, methods),
    )
    return [drawing]


def _gamma_min_drawing(methods: Sequence[MethodRuns]) -> Drawing:
    return Drawing(
        "gamma-min",
        "Least coverage Γmin",
        "Γmin is the number of clients that held the least-held entry of the whole model in a round"
        + (", the least over seeds" if has_seeds(methods) else "")
        + ". Higher is safer: pruning noise weighs less in the bound on convergence. Look for drops, and for orange "
        "points at 0.",
        f"Step chart of least coverage over rounds; over all rounds {_ends(methods, 'gamma_min')}",
        partial(gamma_min_figure, methods),
    )


def _pruning_noise_drawing(methods: Sequence[MethodRuns]) -> Drawing:
    single = len(methods) == 1 and len(methods[0].runs) == 1
    return Drawing(
        "pruning-noise",
        "Pruning noise δ²",
        "δ² = ‖θ − θ∘m‖² / ‖θ‖² is the share of the model's squared norm that a client's mask m removes. The line "
        "is the mean over the round's clients"
        + (" and seeds" if has_seeds(methods) else "")
        + (", the band runs from the smallest to the largest." if len(methods) <= 4 else ".")
        + (" Each point is a client." if single else "")
        + " Look for masks that remove more as training proceeds.",
        f"Line chart of pruning noise over rounds; its mean is {_ends(methods, 'pruning_noise')}",
        partial(pruning_noise_figure, methods),
    )


def _cost_drawing(methods: Sequence[MethodRuns]) -> Drawing:
    return Drawing(
        "costs",
        "Costs against full models",
        "Totals of the run as a share of the same run with full models; the pale bar is 100 %. Bytes count both "
        "directions; multiply-adds are those of one example's forward pass.",
        f"Bar chart of costs as a share of full models; bytes sent {_ends(methods, 'bytes_share')}",
        partial(cost_figure, methods),
    )


def _coverage_drawings(methods: Sequence[MethodRuns]) -> list[Drawing]:
    most = max(len(record.cohort) for method in methods for run in method.runs for record in run.history)
    mapped = [pair for pair in zip(methods, slugs([m.name for m in methods]), strict=True) if _has_layers(pair[0])]
    few = f" Of {len(mapped)} maps, the first {MOST_MAPS} are shown." if len(mapped) > MOST_MAPS else ""
    least = " With several seeds it is the least over them." if has_seeds(methods) else ""
    return [
        Drawing(
            f"coverage-{name}",
            f"Coverage by layer: {method.name}" if len(methods) > 1 else "Coverage by layer",
            _COVERAGE + least + few if number == 0 else "The same map for this run, on the same scale.",
            f"Map of least coverage by tensor and round; {_ends([method], 'gamma_min')} over all",
            partial(coverage_figure, method, most),
            series=method.name if len(methods) > 1 else "",
        )
        for number, (method, name) in enumerate(mapped[:MOST_MAPS])
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
    return write_drawings(drawings(group_runs(open_runs(runs))), folder, formats)


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
    return numbered([_slug(name) for name in names], mark="-")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.")[:60] or "run"


def _has_layers(method: MethodRuns) -> bool:
    return any(record.coverage for run in method.runs for record in run.history)


def _ends(methods: Sequence[MethodRuns], name: str) -> str:
    """Describe one number of each method, its mean over seeds, for readers who cannot see the figure."""
    kinds: dict[str, Callable[..., str]] = {"accuracy": cells.percent, "bytes_share": cells.percent}
    words = []
    for method in methods:
        values = [m.metrics.get(name, getattr(m, name, None)) for m in method.measures]
        if name == "gamma_min":
            text = str(min(m.gamma_min for m in method.measures))
        else:
            average = mean(value for value in values if value is not None)
            text = "not measured" if average is None else kinds.get(name, cells.decimal)(average)
        words.append(f"{method.name} {text}" if len(methods) > 1 else text)
    return ", ".join(words)
