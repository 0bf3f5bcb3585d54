"""``fedcover report``: a page on one run, or one that compares several."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import friendly, out, show_comparison, show_few
from fedcover.errors import InputError


@friendly
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or the folder of a sweep.")],
    out_file: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file; default for one folder: FOLDER/report.html.", metavar="FILE"),
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write each figure into this folder.", metavar="DIR")
    ] = None,
    formats: Annotated[str, typer.Option(help="Formats of the figures: svg, png, pdf.")] = "svg,png",
    as_json: Annotated[bool, typer.Option("--json", help="Print the files written as JSON.")] = False,
) -> None:
    """Write a self-contained HTML page on one run, or one that compares several runs or a sweep.

    Runs whose settings differ only in their seeds are shown as one method: mean, deviation and paired tests.
    """
    from fedcover.report import client_rows, comparison_rows, export_figures, left_out_rows, write_report
    from fedcover.report.loading import open_runs
    from fedcover.report.table import method_rows, paired_rows

    if out_file is None and len(runs) > 1:
        raise InputError(f"comparing {len(runs)} runs needs --out FILE, such as --out comparison.html")
    page = write_report(runs, out_file)
    loaded = open_runs(runs)
    files = export_figures(loaded, figures, [f.strip() for f in formats.split(",")]) if figures else []
    if as_json:
        out.print_json(json.dumps({"report": str(page), "figures": [str(path) for path in files]}))
        return
    show_comparison(method_rows(loaded) or comparison_rows(loaded))
    show_few(paired_rows(loaded), "paired t-tests over common seeds, with Holm's correction")
    for run in loaded:
        of = f" of {run.name}" if len(loaded) > 1 else ""
        show_few(client_rows(run), f"bytes on the wire{of}, beside those of full models")
        show_few(left_out_rows(run), f"clients left out{of}")
    out.print(f"report: {page}")
    if files:
        out.print(f"{len(files)} figures in {figures}")
