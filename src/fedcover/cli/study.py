"""``fedcover study``: experiments of our own, run again in one command."""

from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import BatchProgress, friendly, out, show_table
from fedcover.cli.options import DataOption, EngineOption, QuietOption, RoundsOption, SeedsOption
from fedcover.errors import InputError, check_extra, check_whole
from fedcover.files import write_atomically
from fedcover.paper.experiments import ROUNDS
from fedcover.paper.results import load_all
from fedcover.study import SEEDS, STUDIES, Study
from fedcover.study.playing import Part, play

HOW = (
    "Accuracy is the mean over the last ten rounds, ± one standard deviation over seeds; differences are by seed. "
    "What counts as better or worse has p < 0.05 by Holm's correction over the settings of that count; bold in the "
    "tables of single settings is p < 0.05 by Holm's correction over that table."
)

ON_SCREEN = ("masks", "Γmin", "accuracy, %", "local, %", "uncovered", "MB up", "s a round")
"""What of a wide table a terminal shows; the file has all of it."""


@friendly
def study(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(STUDIES)}.")],
    seeds: SeedsOption = SEEDS,
    rounds: RoundsOption = ROUNDS,
    on: Annotated[str, typer.Option(help="One data set alone, such as mnist.")] = "",
    only: Annotated[str, typer.Option(help="Some techniques alone, such as HeteroFL,FjORD.")] = "",
    engine: EngineOption = "auto",
    results: Annotated[Path | None, typer.Option(help="Report on these results instead of running.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where results, tables and figure go.")] = Path("runs/study"),
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Run a study and show what it says: where `coverage` pays, whether weights by `labels` do, how `methods` compare.

    Paired by seed, with 95 % intervals and Holm's correction. On a GPU it takes minutes, on two cores hours.
    """
    if name not in STUDIES:
        raise InputError(f"there is no study '{name}'; use one of {', '.join(STUDIES)}")
    chosen, path = STUDIES[name], results or folder / f"{name}.json"
    check_whole("seeds", seeds, 1 if chosen.apart else 2)
    check_whole("rounds", rounds, 1)
    if results is None:
        part = Part(name, seeds, rounds, on=on, only=only)
        with BatchProgress(f"{len(part.runs)} runs", len(part.runs) * rounds, quiet) as progress:
            play(part, "fedcover study", path, engine, data, progress)
    _report(name, chosen, path, folder, quiet)


def _report(name: str, chosen: Study, path: Path, folder: Path, quiet: bool) -> None:
    check_extra("report", "drawing a report", "matplotlib", "PIL")
    from fedcover.report.svg import file_bytes
    from fedcover.study.verdict import figure_of, places, rows, tally

    if not path.exists():
        raise InputError(f"{path} is not there; make it with `fedcover study {name}`")
    found = load_all([path], f"fedcover study {name}")
    if not places(chosen, found):
        raise InputError(f"{path} holds no runs of the study '{name}'; make them with `fedcover study {name}`")
    shown = "Accuracies" if chosen.apart else f"Gains over {chosen.base}"
    parts = [f"# {chosen.question}", f"![{shown}]({name}.svg)", HOW]
    tables = {f"Settings {part}": tally(chosen, found, part) for part in chosen.parts}
    tables |= {place: rows(chosen, found, place) for place in places(chosen, found)}
    for title, table in tables.items():
        if not table:
            continue  # one seed alone: nothing can be compared
        heads = list(table[0])
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        lines += ["| " + " | ".join(row.values()) + " |" for row in table]
        parts += [f"## {title}", "\n".join(lines)]
        if not quiet:
            few = [head for head in heads if not chosen.apart or head in ON_SCREEN]
            show_table([{head: row[head].replace("**", "") for head in few} for row in table], title)
    made = [f"`{one['command']}` in {one['seconds']} s on {one['device']}" for one in found.made]
    parts += [f"Made by {made[0]}."] if len(made) == 1 else ["Made by", "\n".join(f"- {one}" for one in made)]
    write_atomically(folder / f"{name}.md", ("\n\n".join(parts) + "\n").encode())
    figure = figure_of(chosen, found)
    for kind in ("svg", "png"):
        write_atomically(folder / f"{name}.{kind}", file_bytes(figure, kind))
    if not quiet:
        out.print(f"{folder / name}.md and its figure")
