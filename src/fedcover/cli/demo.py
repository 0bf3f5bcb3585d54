"""``fedcover demo``: three runs on real data, compared, in under two minutes."""

import time
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import RunProgress, err, friendly, out, say, show_comparison
from fedcover.cli.options import DataOption
from fedcover.cli.run import train, unused, write_page
from fedcover.config.schema import Config, check_config
from fedcover.data import get
from fedcover.errors import InputError

RUNS = (("FullNets", "full", "1111111111"), ("WP-M2", "WP", "1111444444"), ("*WP-M1", "WP", "1111223344"))


@friendly
def demo(
    rounds: Annotated[int, typer.Option(help="Rounds of each of the three runs.")] = 8,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the runs and the report.", metavar="DIR")] = Path(
        "demo"
    ),
    data: DataOption = None,
) -> None:
    """Train FullNets, WP-M2 and *WP-M1 of the paper on MNIST, and compare them on one page.

    WP-M2 and *WP-M1 cost the same; *WP-M1 spreads its masks so that every parameter has 8 holders, not 4.
    """
    from fedcover.report import comparison_rows, load_run, write_report

    start = time.perf_counter()
    name = _data_set(data)
    folder = unused(out_dir)
    with RunProgress() as bar:
        for title, policy, code in RUNS:
            train(_settings(title, policy, code, name, rounds), folder / title.strip("*"), False, data, bar)
    runs = [folder / title.strip("*") for title, _, _ in RUNS]
    for run in runs:
        write_page(run)
    page = write_report(runs, folder / "comparison.html")
    loaded = [load_run(run) for run in runs]
    out.print()
    show_comparison(comparison_rows(loaded))
    out.print(f"\ndata: {(loaded[0].summary or {}).get('data', name)}")
    out.print(f"report: {page.resolve()}   ({time.perf_counter() - start:.0f} s in total)")


def _data_set(data: str | None) -> str:
    try:
        get("mnist", data, progress=lambda line: err.print(f"data: {line}"))
        return "mnist"
    except InputError as error:
        say("note", f"MNIST is not available ({error})", "yellow")
        say("note", "the demo uses the 8x8 digits that ship with fedcover instead", "yellow")
        return "digits"


def _settings(title: str, policy: str, code: str, name: str, rounds: int) -> Config:
    population = {"clients": 20} if name == "digits" else {}
    return check_config(
        {
            "name": title,
            "rounds": rounds,
            "policy": {"name": policy},
            "budgets": {"code": code},
            "data": {"name": name, **population},
        }
    )
