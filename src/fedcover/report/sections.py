"""The parts of the page as HTML; ``text``, ``prose`` and ``attribute`` escape everything that comes from a run."""

import html
import re
from collections.abc import Collection, Mapping, Sequence

from fedcover.report import format as cells
from fedcover.report import verdict
from fedcover.report.figures import Drawing, drawings
from fedcover.report.loading import LoadedRun
from fedcover.report.measures import Measures, measure
from fedcover.report.style import dashes
from fedcover.report.svg import inline_svg
from fedcover.report.table import best_names, comparison_rows, round_rows, setting_rows
from fedcover.report.traffic import client_rows, left_out_rows


def text(plain: object) -> str:
    """Return any text escaped for HTML, with the index of Gamma_min as a subscript."""
    return html.escape(str(plain)).replace("Γmin", "Γ<sub>min</sub>")


def prose(plain: str) -> str:
    """Return a sentence escaped for HTML, without line breaks between a number and its percent sign."""
    return re.sub(r"(?<=\d) (?=%)", "\u00a0", text(plain))


def attribute(plain: object) -> str:
    """Return any text escaped for a double-quoted attribute."""
    return html.escape(str(plain))


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
    numbers = [measure(run.history) for run in runs]
    contents = _tiles_of_one(numbers[0]) if len(runs) == 1 else _tiles_of_many(numbers)
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
    return [
        ("Accuracy", cells.percent(numbers.accuracy), measured),
        ("Local accuracy", cells.percent(numbers.local_accuracy), "mean over clients"),
        ("Test loss", cells.decimal(numbers.loss), "global model"),
        ("Least coverage Γmin", f"{numbers.gamma_min} of {cells.clients(numbers.clients)}", "clients, worst round"),
        ("Uncovered", cells.percent(numbers.uncovered) if numbers.uncovered > 0 else "0 %", uncovered_in),
        ("Pruning noise δ²", cells.decimal(numbers.pruning_noise), "mean over rounds"),
        ("Model held", cells.percent(numbers.kept, 1), "mean over clients and rounds"),
        ("Multiply-adds", cells.percent(numbers.macs_share, 1), "of the full model's"),
        ("Sent, down and up", f"{cells.megabytes(numbers.bytes_down + numbers.bytes_up)} MB", saving),
        ("Time", cells.duration(numbers.seconds), f"{numbers.rounds} round{'s' if numbers.rounds > 1 else ''}"),
    ]


def _tiles_of_many(numbers: Sequence[Measures]) -> list[tuple[str, str, str]]:
    def span(values: Sequence[float | None], digits: int) -> str:
        measured = [value for value in values if value is not None]
        if not measured:
            return cells.MISSING
        low, high = cells.percent(min(measured), digits), cells.percent(max(measured), digits)
        return low if low == high else f"{low.removesuffix(' %')} – {high}"

    gammas = [m.gamma_min for m in numbers]
    gamma = f"{gammas[0]}" if min(gammas) == max(gammas) else f"{min(gammas)} – {max(gammas)}"
    uncovered = sum(m.uncovered > 0 for m in numbers)
    return [
        ("Accuracy", span([m.accuracy for m in numbers], 2), "lowest – highest, test set"),
        ("Least coverage Γmin", gamma, "clients, each run's worst round"),
        ("Uncovered entries", f"{uncovered} of {len(numbers)}", "runs had some, in any round"),
        ("Model held", span([m.kept for m in numbers], 0), "mean over clients and rounds"),
        ("Bytes sent", span([m.bytes_share for m in numbers], 0), "of full models'"),
    ]


def table(
    rows: Sequence[Mapping[str, str]],
    label: str,
    marks: Mapping[tuple[int, str], str] | None = None,
    words: Collection[str] = (),
    keys: Sequence[str] = (),
) -> str:
    """Return rows as a table in a box that scrolls by itself.

    Args:
        rows: The rows, each from header to cell.
        label: Description for screen readers.
        marks: Classes of single cells by row number and header.
        words: Headers of columns with prose; the others are numbers.
        keys: Small drawings before the first cells.
    """

    def kind(header: str, mark: str = "") -> str:
        names = " ".join(name for name in ("words" if header in words else "", mark) if name)
        return f' class="{names}"' if names else ""

    heads = "".join(f'<th scope="col"{kind(header)}>{text(header)}</th>' for header in rows[0])
    body = []
    for number, row in enumerate(rows):
        (_, first), *rest = row.items()
        columns = [f"<td{kind(h, (marks or {}).get((number, h), ''))}>{text(cell)}</td>" for h, cell in rest]
        key = keys[number] if keys else ""
        body.append(f'<tr><th scope="row">{key}{text(first)}</th>{"".join(columns)}</tr>')
    tall = " long" if len(rows) > 20 else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{attribute(label)}">\n<table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n</table>\n</div>"
    )


def comparison(runs: Sequence[LoadedRun]) -> str:
    """Return the table of runs, each with its line style in the figures."""
    best = best_names(runs)
    marks: dict[tuple[int, str], str] = {}
    for number, run in enumerate(runs):
        marks |= {(number, header): "best" for header, names in best.items() if run.name in names}
        if measure(run.history).uncovered > 0:
            marks[number, "uncovered"] = "bad"
    keys = [_key(number) for number in range(len(runs))]
    return f"<h2>Runs</h2>\n{table(comparison_rows(runs), 'Runs compared', marks, keys=keys)}"


def _key(index: int) -> str:
    """Return the line style of the index-th run as a small drawing."""
    strokes = " ".join(f"{2 * length:g}" for length in dashes(index))
    dash = f' stroke-dasharray="{strokes}"' if strokes else ""
    stroke = f'stroke="var(--series-{index % 8 + 1})"{dash}'
    return f'<svg class="key" viewBox="0 0 30 10" aria-hidden="true"><path d="M0 5H30" {stroke}/></svg>'


def figures(runs: Sequence[LoadedRun]) -> str:
    """Return every figure with its title, caption and a place for its buttons to save."""
    return '<h2>Figures</h2>\n<div class="figures">\n' + "\n".join(map(figure, drawings(runs))) + "\n</div>"


def figure(drawing: Drawing) -> str:
    """Return one figure with its title, caption and a place for its buttons to save."""
    drawn = drawing.draw()
    kind = ' class="tall"' if drawn.get_figheight() > drawn.get_figwidth() else ""
    svg = inline_svg(drawn, re.sub(r"[^a-z0-9-]", "-", drawing.name), attribute(drawing.alt))
    return (
        f'<figure{kind}>\n<div class="head"><h3>{text(drawing.title)}</h3>'
        f'<span class="get" data-name="{attribute(drawing.name)}"></span></div>\n'
        f"{svg}\n<figcaption>{prose(drawing.caption)}</figcaption>\n</figure>"
    )


def certificates(runs: Sequence[LoadedRun]) -> str:
    """Return the certificate of each certified run: a sentence, and the terms of the bound."""
    summaries = ((run.name, (run.summary or {}).get("certificate")) for run in runs)
    certified = {name: summary for name, summary in summaries if isinstance(summary, dict) and summary.get("sentence")}
    if not certified:
        return ""
    parts = ["<h2>Certificate</h2>"]
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
    return "\n".join(["<h2>Clients</h2>", *parts]) if parts else ""


def rounds(runs: Sequence[LoadedRun]) -> str:
    """Return the table of rounds of each run, folded."""
    parts = ["<h2>Rounds</h2>"]
    for run in runs:
        rows = round_rows(run)
        count = f"{len(run.history)} round{'s' if len(run.history) > 1 else ''}"
        if len(rows) < len(run.history):
            count += f", of which {len(rows)} are shown; history.jsonl has all"
        name = f"{run.name}: " if len(runs) > 1 else ""
        marks = {(n, "uncovered"): "bad" for n, row in enumerate(rows) if row["uncovered"] != "0 %"}
        body = table(rows, f"Rounds of {run.name}", marks, words=("left out",))
        parts.append(f"<details>\n<summary>{text(name + count)}</summary>\n{body}\n</details>")
    return "\n".join(parts)


def settings(runs: Sequence[LoadedRun]) -> str:
    """Return config and versions; of several runs first what differs, then what they share."""
    parts = []
    for title, tables in (("Settings", [run.config for run in runs]), ("Versions", [run.versions for run in runs])):
        parts.append(f"<h2>{title}</h2>")
        names = [run.name for run in runs] if len(runs) > 1 else ["value"]
        rows = setting_rows(tables, names)
        if not rows:
            parts.append(f'<p class="about">No {title.lower()} were recorded.</p>')
            continue
        if len(runs) == 1:
            parts.append(
                _fold(
                    "All settings" if title == "Settings" else "All versions", rows, names, opened=title == "Settings"
                )
            )
            continue
        differing = [row for row in rows if len({row[name] for name in names}) > 1]
        shared = [{"": row[""], "value": row[names[0]]} for row in rows if row not in differing]
        parts.append(_fold("Different between the runs", differing, names, opened=True) if differing else "")
        parts.append(_fold("The same in all runs", shared, ["value"], opened=False) if shared else "")
    return "\n".join(part for part in parts if part)


def _fold(title: str, rows: Sequence[Mapping[str, str]], names: Sequence[str], opened: bool) -> str:
    state = " open" if opened else ""
    return f"<details{state}>\n<summary>{text(title)}</summary>\n{table(rows, title, words=names)}\n</details>"
