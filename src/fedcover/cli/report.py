"""``fedcover report``: a page on one run, or one that compares several."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import friendly, out, show_comparison, show_few
from fedcover.errors import InputError


@friendly
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="HTML file; default for one run: RUN/report.html.", metavar="FILE")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also write each figure into this folder.", metavar="DIR")
    ] = None,
    formats: Annotated[str, typer.Option(help="Formats of the figures: svg, png, pdf.")] = "svg,png",
    as_json: Annotated[bool, typer.Option("--json", help="Print the files written as JSON.")] = False,
) -> None:
    """Write a self-contained HTML page on one run, or one that compares several."""
    from fedcover.report import client_rows, comparison_rows, export_figures, left_out_rows, load_run, write_report

    if len(runs) > 1 and out_file is None:
        raise InputError(f"comparing {len(runs)} runs needs --out FILE, such as --out comparison.html")
    page = write_report(runs, out_file)
    loaded = [load_run(path) for path in runs]
    files = export_figures(loaded, figures, [f.strip() for f in formats.split(",")]) if figures else []
    if as_json:
        out.print_json(json.dumps({"report": str(page), "figures": [str(path) for path in files]}))
        return
    show_comparison(comparison_rows(loaded))
    for run in loaded:
        of = f" of {run.name}" if len(loaded) > 1 else ""
        show_few(client_rows(run), f"bytes on the wire{of}, beside those of full models")
        show_few(left_out_rows(run), f"clients left out{of}")
    out.print(f"report: {page}")
    if files:
        out.print(f"{len(files)} figures in {figures}")
