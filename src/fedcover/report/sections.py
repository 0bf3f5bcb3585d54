"""The sections of the page on runs, as HTML."""

from collections.abc import Mapping, Sequence

from fedcover.report import format as cells
from fedcover.report import verdict
from fedcover.report.elements import figure, key, legend, prose, section_heading, table, text
from fedcover.report.figures import LegendEntry, drawings
from fedcover.report.loading import LoadedRun
from fedcover.report.measures import Measures, metric_names
from fedcover.report.methods import MethodRuns, has_seeds
from fedcover.report.table import (
    MOST_ROWS,
    MOST_ROWS_IN_ALL,
    UNDECIDED,
    best_names,
    comparison_rows,
    method_rows,
    paired_rows,
    round_rows,
    setting_rows,
)
from fedcover.report.traffic import client_rows, left_out_rows


def heading(runs: Sequence[LoadedRun]) -> str:
    """Return title, verdict, warnings, and the source of the data."""
    parts = [
        '<p class="over">fedcover report</p>',
        f"<h1>{text(verdict.title(runs))}</h1>",
        f'<p class="verdict">{prose(verdict.verdict(runs))}</p>',
    ]
    boxes = [("warning", *box) for box in verdict.warnings(runs)] + [("notice", *box) for box in verdict.notes(runs)]
    parts += [f'<p class="{kind}"><strong>{text(head)}.</strong> {prose(body)}</p>' for kind, head, body in boxes]
    abouts = {run.name: about for run in runs if (about := _about(run))}
    if len(set(abouts.values())) > 1:
        abouts = {name: f"{name}: {about}" for name, about in abouts.items()}
    parts += [f'<p class="about">{text(about)}</p>' for about in dict.fromkeys(abouts.values())]
    return "\n".join(parts)


def _about(run: LoadedRun) -> str:
    """Return the run's data, model size and engine, as far as its summary has them."""
    summary = run.summary or {}
    sentences = []
    if data := summary.get("data"):
        sentences.append(f"Data: {str(data).rstrip('.')}.")
    if isinstance(parameters := summary.get("parameters"), int):
        sentences.append(f"{parameters:,} parameters.")
    if engine := summary.get("engine"):
        sentences.append(f"Engine: {engine}.")
    return " ".join(sentences)


def tiles(runs: Sequence[LoadedRun]) -> str:
    """Return the key numbers; of several runs their ranges."""
    numbers = [run.measures for run in runs]
    contents = (
        _tiles_of_one(numbers[0]) if len(runs) == 1 else _tiles_of_many(numbers, metric_names(r.history for r in runs))
    )
    boxes = []
    for label, value, note in contents:
        below = f'<dd class="note">{text(note)}</dd>' if note else ""
        boxes.append(f"<div><dt>{text(label)}</dt><dd>{text(value)}</dd>{below}</div>")
    return '<dl class="tiles">\n' + "\n".join(boxes) + "\n</dl>"


def _tiles_of_one(numbers: Measures) -> list[tuple[str, str, str]]:
    saved = None if numbers.bytes_share is None else 1 - numbers.bytes_share
    saving = (
        "" if saved is None else f"{cells.percent(abs(saved), 1)} {'fewer' if saved >= 0 else 'more'} than full models"
    )
    measured = "" if numbers.accuracy_round is None else f"global model, test set, round {numbers.accuracy_round}"
    uncovered_in = (
        f"in {numbers.uncovered_rounds} of {numbers.rounds} rounds" if numbers.uncovered > 0 else "in any round"
    )
    others = {name: value for name, value in numbers.metrics.items() if name != "accuracy"}
    tiles = [(cells.heading(name), cells.decimal(value), "global model, test set") for name, value in others.items()]
    if numbers.accuracy is not None or not others:
        tiles.insert(0, ("Accuracy", cells.percent(numbers.accuracy), measured))
        tiles.insert(1, ("Local accuracy", cells.percent(numbers.local_accuracy), "mean over clients"))
    return [
        *tiles,
        ("Test loss", cells.decimal(numbers.loss), "global model"),
        ("Least coverage Γmin", f"{numbers.gamma_min} of {cells.clients(numbers.clients)}", "clients, worst round"),
        ("Uncovered", cells.percent(numbers.uncovered) if numbers.uncovered > 0 else "0 %", uncovered_in),
        ("Pruning noise δ²", cells.decimal(numbers.pruning_noise), "mean over rounds"),
        ("Model held", cells.percent(numbers.kept, 1), "mean over clients and rounds"),
        ("Multiply-adds", cells.percent(numbers.macs_share, 1), "of the full model's"),
        ("Sent, down and up", f"{cells.megabytes(numbers.bytes_down + numbers.bytes_up)} MB", saving),
        ("Time", cells.duration(numbers.seconds), f"{numbers.rounds} round{'s' if numbers.rounds > 1 else ''}"),
    ]


def _tiles_of_many(numbers: Sequence[Measures], metrics: Sequence[str]) -> list[tuple[str, str, str]]:
    def span(values: Sequence[float | None], digits: int | None = None) -> str:
        measured = [value for value in values if value is not None]
        if not measured:
            return cells.MISSING
        low, high = (
            cells.decimal(end) if digits is None else cells.percent(end, digits)
            for end in (min(measured), max(measured))
        )
        return low if low == high else f"{low.removesuffix(' %')} – {high}"

    gammas = [m.gamma_min for m in numbers]
    gamma = f"{gammas[0]}" if min(gammas) == max(gammas) else f"{min(gammas)} – {max(gammas)}"
    uncovered = sum(m.uncovered > 0 for m in numbers)
    return [
        *(
            (
                cells.heading(name),
                span([m.metrics.get(name) for m in numbers], 2 if name == "accuracy" else None),
                "lowest – highest, test set",
            )
            for name in metrics
        ),
        ("Least coverage Γmin", gamma, "clients, each run's worst round"),
        ("Uncovered entries", f"{uncovered} of {len(numbers)}", "runs had some, in any round"),
        ("Model held", span([m.kept for m in numbers], 0), "mean over clients and rounds"),
        ("Bytes sent", span([m.bytes_share for m in numbers], 0), "of full models'"),
    ]


def comparison(methods: Sequence[MethodRuns]) -> str:
    """Return the table of methods with their paired tests, if there are several seeds, and the table of runs."""
    runs = [run for method in methods for run in method.runs]
    if len(runs) == 1:
        return ""
    if not has_seeds(methods):
        numbers = {method.name: method.measures for method in methods}
        keys = [key(number) for number in range(len(methods))]
        body = table(comparison_rows(runs), "Runs compared", _marks(numbers), keys=keys)
        return f"{section_heading('Runs')}\n{body}"
    return "\n".join(part for part in (_methods(methods, runs), _tests(runs), _runs_of(methods)) if part)


def _methods(methods: Sequence[MethodRuns], runs: Sequence[LoadedRun]) -> str:
    keys = [key(number) for number in range(len(methods))]
    rows = method_rows(runs)
    body = table(rows, "Methods compared", _marks({m.name: m.measures for m in methods}), keys=keys)
    note = (
        "Runs whose settings differ only in their seeds are one method. Metrics and loss are mean ± standard deviation "
        "over seeds, Γmin is the least, uncovered the worst, and costs are means."
    )
    if stopped := _stopped_early(methods):
        note += f" Stopped by a callback: {stopped}; their last values count."
    return f'{section_heading("Methods")}\n<p class="about">{prose(note)}</p>\n{body}'


def _stopped_early(methods: Sequence[MethodRuns]) -> str:
    """Return the runs that a callback stopped, in words."""
    return ", ".join(
        f"{method.name} seed {seed} after round {run.summary['stopped']['round']}"
        for method in methods
        for seed, run in method.by_seed.items()
        if run.summary and run.summary.get("stopped")
    )


def _tests(runs: Sequence[LoadedRun]) -> str:
    rows = paired_rows(runs)[:MOST_ROWS]
    if not rows:
        return ""
    marks = {(n, "verdict"): "open" if row["verdict"] == UNDECIDED else "clear" for n, row in enumerate(rows)}
    note = (
        "Difference first − second after the last round (accuracy in points), paired by seed: Student's t-test, p with "
        f"Holm's correction over all pairs of a metric. “{UNDECIDED.capitalize()}” does not mean that there is none."
    )
    body = table(rows, "Paired tests", marks, words=("second", "metric", "verdict"))
    return f'{section_heading("Paired tests")}\n<p class="about">{prose(note)}</p>\n{body}'


def _runs_of(methods: Sequence[MethodRuns]) -> str:
    """Return the table of all runs, folded, each with the line style of its method."""
    runs = [run for method in methods for run in method.runs]
    keys = [key(number) for number, method in enumerate(methods) for _ in method.runs]
    numbers = {run.name: [run.measures] for run in runs}
    body = table(comparison_rows(runs), "Runs compared", _marks(numbers), keys=keys)
    return f"<details>\n<summary>All {len(runs)} runs</summary>\n{body}\n</details>"


def _marks(numbers: Mapping[str, Sequence[Measures]]) -> dict[tuple[int, str], str]:
    """Return the classes of the best values, and of shares that no client held."""
    best = best_names(numbers)
    marks: dict[tuple[int, str], str] = {}
    for number, (name, measures) in enumerate(numbers.items()):
        marks |= {(number, header): "best" for header, names in best.items() if name in names}
        if any(m.uncovered > 0 for m in measures):
            marks[number, "uncovered"] = "bad"
    return marks


def figures(methods: Sequence[MethodRuns]) -> str:
    """Return every figure, under one legend for all of them if there are several methods."""
    entries = [LegendEntry(method.name, index, method.name) for index, method in enumerate(methods)]
    shared = legend(entries, shared=True) if len(entries) > 1 else ""
    drawn = "\n".join(map(figure, drawings(methods)))
    return f'{section_heading("Figures")}\n{shared}\n<div class="figures">\n{drawn}\n</div>'


def certificates(runs: Sequence[LoadedRun]) -> str:
    """Return the certificate of each certified run: a sentence, and the terms of the bound."""
    summaries = ((run.name, (run.summary or {}).get("certificate")) for run in runs)
    certified = {name: summary for name, summary in summaries if isinstance(summary, dict) and summary.get("sentence")}
    if not certified:
        return ""
    parts = [section_heading("Certificate")]
    for name, summary in certified.items():
        head = f"{text(name)}: " if len(certified) > 1 else ""
        sentence = str(summary["sentence"])
        parts.append(f'<p class="about">{head}{prose(sentence[0].upper() + sentence[1:])}.</p>')
    rows = [
        {
            "run": name,
            "theorem": f"{summary.get('theorem')}",
            "Γmin": f"{summary.get('gamma_min')}",
            **{str(term): cells.decimal(value) for term, value in summary["terms"].items()},
            "bound": cells.decimal(summary.get("total")),
            "largest": f"{summary.get('dominant') or cells.MISSING}",
            "step size holds": "yes" if summary.get("step_holds") else "no",
        }
        for name, summary in certified.items()
        if isinstance(summary.get("terms"), dict)
    ]
    return "\n".join([*parts, table(rows, "Certificates", words=("largest", "step size holds")) if rows else ""])


def traffic(runs: Sequence[LoadedRun]) -> str:
    """Return bytes on the wire by client, and the clients left out with reasons; "" for a run without a network."""
    parts = []
    for run in runs:
        of = f" of {run.name}" if len(runs) > 1 else ""
        if rows := client_rows(run):
            body = table(rows, f"Bytes on the wire of {run.name}")
            parts.append(f"<h3>{text(f'Bytes on the wire{of}, beside those of full models')}</h3>\n{body}")
        if rows := left_out_rows(run):
            body = table(rows, f"Clients left out of {run.name}", words=("reason",))
            parts.append(f"<h3>{text(f'Left out{of}')}</h3>\n{body}")
    return "\n".join([section_heading("Clients"), *parts]) if parts else ""


def rounds(runs: Sequence[LoadedRun]) -> str:
    """Return the table of rounds of each run, folded."""
    parts = [section_heading("Rounds")]
    for run in runs:
        rows = round_rows(run, min(MOST_ROWS, max(MOST_ROWS_IN_ALL // len(runs), 20)))
        count = f"{len(run.history)} round{'s' if len(run.history) > 1 else ''}"
        if len(rows) < len(run.history):
            count += f", of which {len(rows)} are shown; history.jsonl has all"
        name = f"{run.name}: " if len(runs) > 1 else ""
        marks = {(n, "uncovered"): "bad" for n, row in enumerate(rows) if row["uncovered"] != "0 %"}
        body = table(rows, f"Rounds of {run.name}", marks, words=("left out",))
        parts.append(f"<details>\n<summary>{text(name + count)}</summary>\n{body}\n</details>")
    return "\n".join(parts)


def settings(methods: Sequence[MethodRuns]) -> str:
    """Return config and versions; of several methods first what differs, then what they share."""
    parts = []
    first = [method.runs[0] for method in methods]
    configs = [{**run.config} for run in first]
    if has_seeds(methods):
        for config, method in zip(configs, methods, strict=True):
            config["seed"] = ", ".join(f"{seed}" for seed in method.by_seed)
            config.pop("name", None)
    for title, tables in (("Settings", configs), ("Versions", [run.versions for run in first])):
        parts.append(section_heading(title))
        names = [method.name for method in methods] if len(methods) > 1 else ["value"]
        rows = setting_rows(tables, names)
        if not rows:
            parts.append(f'<p class="about">No {title.lower()} were recorded.</p>')
            continue
        if len(methods) == 1:
            parts.append(_fold(f"All {title.lower()}", rows, names, opened=title == "Settings"))
            continue
        differing = [row for row in rows if len({row[name] for name in names}) > 1]
        shared = [{"": row[""], "value": row[names[0]]} for row in rows if row not in differing]
        of = "methods" if has_seeds(methods) else "runs"
        parts.append(_fold(f"Different between the {of}", differing, names, opened=True) if differing else "")
        parts.append(_fold(f"The same in all {of}", shared, ["value"], opened=False) if shared else "")
    return "\n".join(part for part in parts if part)


def _fold(title: str, rows: Sequence[Mapping[str, str]], names: Sequence[str], opened: bool) -> str:
    state = " open" if opened else ""
    return f"<details{state}>\n<summary>{text(title)}</summary>\n{table(rows, title, words=names)}\n</details>"
