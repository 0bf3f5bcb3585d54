"""The verdict on one run or several: sentences built from the numbers, as plain text that the page escapes."""

from collections.abc import Callable, Sequence
from statistics import fmean

from fedcover.report import format as cells
from fedcover.report.loading import LoadedRun, absent_runs
from fedcover.report.measures import Measures, metric_names, present
from fedcover.report.methods import group_runs, has_seeds, mean_and_deviation


def title(runs: Sequence[LoadedRun]) -> str:
    """Return the title of the page."""
    if len(runs) == 1:
        return runs[0].name
    methods = group_runs(runs)
    if not has_seeds(methods):
        return f"Comparison of {len(runs)} runs"
    if len(methods) == 1:
        return f"{methods[0].name} with {len(runs)} seeds"
    return f"Comparison of {len(methods)} methods over seeds"


def verdict(runs: Sequence[LoadedRun]) -> str:
    """Return the outcome in one sentence."""
    return _verdict_on_one(runs[0]) if len(runs) == 1 else _verdict_on_many(runs)


def warnings(runs: Sequence[LoadedRun]) -> list[tuple[str, str]]:
    """Return what a reader must know before trusting the numbers, each as a heading and a sentence."""
    boxes = []
    for method in group_runs(runs):
        numbers = {run.name: run.measures for run in method.runs}
        kinds: list[tuple[str, Callable[[Measures], float], Callable[[Measures], str]]] = [
            ("Uncovered parameters", lambda m: m.uncovered, _uncovered),
            ("Rejected updates", lambda m: m.rejected, _rejected),
        ]
        for head, count, sentence in kinds:
            if affected := {name: m for name, m in numbers.items() if count(m) > 0}:
                worst = max(affected, key=lambda name: count(affected[name]))
                where = f" in {method.name}" if len(runs) > len(numbers) else ""
                of = f"In {len(affected)} of {len(numbers)} seeds; worst is {worst}. " if len(numbers) > 1 else ""
                boxes.append((f"{head}{where}", of + sentence(affected[worst])))
    return boxes


def notes(runs: Sequence[LoadedRun]) -> list[tuple[str, str]]:
    """Return further notes, each as a heading and a sentence: runs of a sweep that are missing, and unfinished runs."""
    return [*_missing(runs), *_unfinished_notes(runs)]


def _missing(runs: Sequence[LoadedRun]) -> list[tuple[str, str]]:
    absent = absent_runs(runs)
    failed = [entry for entry in absent if entry.error]
    waiting = len(absent) - len(failed)
    boxes = []
    if failed:
        names = ", ".join(entry.path.name for entry in failed[:3]) + (", ..." if len(failed) > 3 else "")
        head = f"{len(failed)} run{'s' if len(failed) > 1 else ''} of the sweep failed"
        boxes.append((head, f"{names}. The first reason: {failed[0].error}."))
    if waiting:
        head = f"{waiting} run{'s' if waiting > 1 else ''} of the sweep {'have' if waiting > 1 else 'has'} not started"
        boxes.append((head, "They are not part of this page." if waiting > 1 else "It is not part of this page."))
    return boxes


def _unfinished_notes(runs: Sequence[LoadedRun]) -> list[tuple[str, str]]:
    unfinished = [run for run in runs if run.summary is None]
    if len(unfinished) > 3:
        done = ", ".join(f"{run.name} {len(run.history)} of {run.planned_rounds or 'unknown'}" for run in unfinished)
        return [(f"{len(unfinished)} of {len(runs)} runs are unfinished", f"Rounds so far: {done}.")]
    return [(f"Unfinished{f': {run.name}' if len(runs) > 1 else ''}", _unfinished(run)) for run in unfinished]


def _verdict_on_one(run: LoadedRun) -> str:
    numbers = run.measures
    return f"After {_rounds(numbers.rounds)}: {_accuracy(run, numbers)}; {_coverage(numbers)}; {_cost(numbers)}."


def _accuracy(run: LoadedRun, numbers: Measures) -> str:
    if numbers.accuracy is None and numbers.metrics:
        return (
            f"{', '.join(f'{name} {cells.decimal(value)}' for name, value in numbers.metrics.items())} on the test set"
        )
    if numbers.accuracy is None:
        return "the model has not been evaluated"
    text = f"accuracy {cells.percent(numbers.accuracy)} on the test set"
    late = numbers.accuracy_round != run.history.last.round
    return f"{text} (last measured in round {numbers.accuracy_round})" if late else text


def _coverage(numbers: Measures) -> str:
    if numbers.uncovered > 0:
        return f"some parameters were held by no client in {_some_rounds(numbers)}"
    when = "every round" if numbers.rounds > 1 else "that round"
    if numbers.clients[0] == numbers.clients[1] == numbers.gamma_min:
        return f"every parameter was held by all {numbers.gamma_min} clients in {when}"
    clients = f"{numbers.gamma_min} of {cells.clients(numbers.clients)} clients"
    return f"every parameter was held by at least {clients} in {when}"


def _cost(numbers: Measures) -> str:
    size = "clients held the whole model"
    if numbers.kept is not None and numbers.kept < 1:
        size = f"clients held {cells.rough_percent(numbers.kept)} of the model on average"
    if numbers.bytes_share is None:
        return size
    saved = 1 - numbers.bytes_share
    if abs(saved) < 0.0005:
        return f"{size} and sent as many bytes as with full models"
    difference = f"{cells.rough_percent(abs(saved))} {'fewer' if saved > 0 else 'more'}"
    return f"{size} and sent {difference} bytes than with full models"


def _verdict_on_many(runs: Sequence[LoadedRun]) -> str:
    numbers = {run.name: run.measures for run in runs}
    methods = group_runs(runs)
    metric = metric_names(run.history for run in runs)[0]
    form = cells.percent if metric == "accuracy" else cells.decimal
    values = {m.name: present(n.metrics.get(metric) for n in m.measures) for m in methods}
    ranked = sorted((fmean(measured), name) for name, measured in values.items() if measured)
    texts = {name: mean_and_deviation(measured, form) for name, measured in values.items()}
    parts = []
    if ranked:
        low, high = ranked[0][1], ranked[-1][1]
        spread = f"from {texts[low]} ({low}) to {texts[high]} ({high})"
        if len(ranked) == 1:
            spread = texts[high] if len(methods) == 1 else f"{texts[high]} ({high})"
        parts.append(f"{metric} {spread} on the test set")
    else:
        parts.append("no run has been evaluated")
    parts.append(f"the least-held parameter was held by {_range([m.gamma_min for m in numbers.values()])} clients")
    shares = [m.bytes_share for m in numbers.values() if m.bytes_share is not None]
    if shares:
        low_share, high_share = cells.rough_percent(min(shares)), cells.rough_percent(max(shares))
        spread = low_share if low_share == high_share else f"{low_share} to {high_share}"
        parts.append(f"clients sent {spread} of the bytes of full models")
    start = f"{len(runs)} runs of {_range([m.rounds for m in numbers.values()])} rounds"
    if has_seeds(methods):
        seeds = _range([len(method.runs) for method in methods])
        start += f", {len(methods)} method{'s' if len(methods) > 1 else ''} with {seeds} seeds each (mean ± deviation)"
    return f"{start}: {'; '.join(parts)}."


def _range(values: Sequence[int]) -> str:
    return f"{min(values)}" if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _rounds(count: int) -> str:
    return "1 round" if count == 1 else f"{count} rounds"


def _some_rounds(numbers: Measures) -> str:
    if numbers.uncovered_rounds == numbers.rounds:
        return "every round" if numbers.rounds > 1 else "that round"
    return f"{numbers.uncovered_rounds} of {numbers.rounds} rounds"


def _uncovered(numbers: Measures) -> str:
    share = cells.percent(numbers.uncovered)
    text = f"In {_some_rounds(numbers)} no client held some entries (up to {share} of the model)"
    text += ", so these were not trained and kept their old values."
    if hole := numbers.hole:
        share = cells.percent(hole.share)
        text += f" The worst layer is {hole.layer}: {share} of it was uncovered in round {hole.round}."
    return text


def _rejected(numbers: Measures) -> str:
    updates = "1 client update was" if numbers.rejected == 1 else f"{numbers.rejected} client updates were"
    return f"{updates} left out of the average; the table of clients left out lists the reasons."


def _unfinished(run: LoadedRun) -> str:
    planned = run.planned_rounds
    done = f"{len(run.history)} of {planned}" if planned else f"{len(run.history)}"
    return f"There is no summary yet; the numbers cover {done} rounds."
