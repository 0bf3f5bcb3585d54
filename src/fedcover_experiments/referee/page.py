"""The leaderboard as files: a page that can be sorted and filtered, and Markdown."""

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.report.elements import attribute, figure, prose, section_heading, table, text
from fedcover.report.figures import Drawing, LegendEntry
from fedcover.report.page import frame
from fedcover.report.style import draw_line, fit_rounds, mark_series, new_axes, styled
from fedcover_experiments.markdown import markdown_table
from fedcover_experiments.referee.leaderboard import Entry, leaderboard
from fedcover_experiments.referee.methods import METHODS
from fedcover_experiments.referee.published import beside_ours
from fedcover_experiments.referee.rows import COMMAND, RefereeResults
from fedcover_experiments.referee.sentences import sentences
from fedcover_experiments.referee.tables import WORDS, entries_table, methods_table, provenance, settings_table

TITLE = "The referee"
ABOUT = (
    "Methods of the field at the field's own settings, under one protocol that was fixed before the results. "
    "Accuracy is that of the global model, the mean of the evaluations in the last tenth of the rounds, ± one standard "
    "deviation over seeds. "
    "Gains are in points, paired by seed, with 95 % intervals; p is corrected by Holm's method over the methods of a "
    "setting."
)
HOW = (
    "Click on a heading to sort, and on a method to see the curves of its setting. The pointer on an accuracy shows "
    "its seeds."
)
IN_MARKDOWN = ("method", "accuracy, %", "gain over HeteroFL", "p (Holm)", "gain over smallest", "worst level, %",
               "local, %", "Γmin", "uncovered", "MB per round", "note")  # fmt: skip
PAGE, MARKDOWN = "leaderboard.html", "referee.md"


def write_leaderboard(results: RefereeResults, folder: Path) -> list[Path]:
    """Write the page and the Markdown into a folder; return the paths.

    Raises:
        InputError: If there are no results yet.
    """
    entries = leaderboard(results)
    if not entries:
        raise InputError(f"there are no results yet; produce some with `{COMMAND}`")
    return [
        write_atomically(folder / PAGE, as_html(results, entries).encode()),
        write_atomically(folder / MARKDOWN, as_markdown(results, entries).encode()),
    ]


def as_html(results: RefereeResults, entries: Sequence[Entry]) -> str:
    """Return the leaderboard as one self-contained page."""
    script = files("fedcover_experiments.referee").joinpath("leaderboard.js").read_text("utf-8")
    marked = entries_table(entries)
    board = table(marked.rows, "Leaderboard", marked.marks, WORDS, titles=marked.titles)
    parts = [
        f'<p class="over">{COMMAND}</p>\n<h1>{TITLE}</h1>\n<p class="verdict">{prose(ABOUT)}</p>',
        *(f'<p class="notice">{prose(sentence)}</p>' for sentence in notices(entries)),
        *(f"<p>{prose(sentence)}</p>" for sentence in sentences(entries)),
        section_heading("Leaderboard"),
        f'<p class="about">{prose(HOW)}</p>\n<div class="leaderboard">{board}</div>',
        section_heading("Curves"),
        *(_curves(group) for group in _by_setting(entries)),
        section_heading("Published numbers beside ours"),
        table(beside_ours(entries), "Published numbers beside ours", words=WORDS),
        section_heading("Settings"),
        table(settings_table(results, entries), "Settings", words=WORDS),
        section_heading("Methods"),
        table(methods_table(entries), "Methods", words=WORDS),
        section_heading("Data and machines"),
        *(f'<p class="about">{prose(sentence)}</p>' for sentence in provenance(results)),
    ]
    return frame(TITLE, parts, script)


def notices(entries: Sequence[Entry]) -> list[str]:
    """Return a sentence on reduced runs, if there are some."""
    lengths = dict.fromkeys(f"{e.rounds} of {e.whole_rounds} rounds" for e in entries if e.reduced)
    shown = " or ".join(lengths)
    sentence = f"Some of these runs are reduced, to {shown}: they show how the referee works, not which method is best."
    return [sentence] if lengths else []


def _by_setting(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        if entry.rows:
            groups.setdefault((entry.setting, entry.rounds), []).append(entry)
    return list(groups.values())


def _curves(entries: Sequence[Entry]) -> str:
    """Return the curves of a setting, in a part of the page that is folded at first."""
    setting, rounds = entries[0].setting, entries[0].rounds
    names = [entry.method for entry in entries]
    drawing = Drawing(
        f"curves-{re.sub(r'[^a-z0-9]+', '-', setting.lower())}-{rounds}",
        f"Accuracy over rounds: {setting}",
        "Accuracy of the global model on the test set, mean over seeds.",
        f"Accuracy over rounds of {len(names)} methods",
        lambda: curves_figure(entries),
        [LegendEntry(name, style_of(name), name) for name in names],
    )
    label = f"{setting}, {rounds} rounds"
    return (
        f'<details class="curves" data-curves="{attribute(f"{setting} {rounds}")}">\n<summary>{text(label)}</summary>\n'
        f'<div class="figures">\n{figure(drawing)}\n</div>\n</details>'
    )


def style_of(method: str) -> int:
    """Return the number of a method's colour and dashes, the same in all settings."""
    return list(METHODS).index(method) if method in METHODS else len(METHODS)


@styled
def curves_figure(entries: Sequence[Entry]) -> Figure:
    """Draw the mean accuracy over seeds of each entry of a setting."""
    drawn, axes = new_axes("accuracy, %")
    for entry in entries:
        curves = [dict(row.curve) for row in entry.rows]
        rounds = [index for index in curves[0] if all(index in curve for curve in curves)]
        means = [100 * fmean(curve[index] for curve in curves) for index in rounds]
        mark_series(draw_line(axes, rounds, means, style_of(entry.method)), entry.method)
    fit_rounds(axes, [index for entry in entries for row in entry.rows for index, _ in row.curve])
    return drawn


def as_markdown(results: RefereeResults, entries: Sequence[Entry]) -> str:
    """Return the leaderboard as Markdown: sentences, one table per setting, and published numbers beside ours."""
    parts = [
        f"# {TITLE}",
        f"[The leaderboard as a page]({PAGE}) that can be sorted and filtered; "
        "[the protocol](referee-protocol.md), which was fixed before the results.",
        ABOUT,
        *(f"> {sentence}" for sentence in notices(entries)),
        "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences(entries), 1)),
    ]
    for group in _by_setting(entries):
        rows = entries_table(group).rows
        parts += [f"## {group[0].setting}", markdown_table([{head: row[head] for head in IN_MARKDOWN} for row in rows])]
    parts += ["## Published numbers beside ours", markdown_table(beside_ours(entries))]
    parts += ["## Settings", markdown_table(settings_table(results, entries))]
    parts += ["## Data and machines", *provenance(results)]
    commands = dict.fromkeys(str(batch["command"]) for batch in results.batches)
    return "\n\n".join([*parts, "Produced by", "\n".join(f"- `{command}`" for command in commands)]) + "\n"
