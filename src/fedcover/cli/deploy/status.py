"""``fedcover deploy status``: the nodes, the newest round and the runs of a server."""

import time
from collections.abc import Mapping, Sequence

from rich.table import Table

from fedcover.cli.console import friendly, out
from fedcover.cli.deploy.options import STATE, StateOption
from fedcover.cli.options import JsonOption
from fedcover.deploy.status.fleet_status import FleetStatus, read_status
from fedcover.deploy.status.rows import headline, node_rows, rejection_lines, round_rows, run_rows
from fedcover.deploy.status.words import coverage_line, refusals_text, round_line
from fedcover.errors import check_extra

MAX_RUNS = 5
"""The most runs that are shown."""
WORDS = ("node", "state", "run", "from")
"""The headers of columns that are not numbers."""


@friendly
def status(state: StateOption = STATE, as_json: JsonOption = False) -> None:
    """Show the nodes of a server, the newest round of its newest run, and its runs.

    It is started on the server's machine, and reads what the server publishes in its folder every two seconds. "Lost
    without it" is the share of the model that nobody would train in that round if the node were missing.
    """
    check_extra("flower", "a deployment", "flwr")
    fleet = read_status(state)
    if as_json:
        out.print(fleet.to_json(), end="")
        return
    _show_nodes(fleet)
    if fleet.newest is not None:
        out.print()
        out.print(round_line(fleet.newest), style="bold")
        out.print(coverage_line(fleet.newest))
        _show(round_rows(fleet))
        for line in rejection_lines(fleet):
            out.print(line)
    _show_runs(fleet)
    if fleet.problem:
        out.print(f"not up to date: {fleet.problem}", style="yellow")


def _show_nodes(fleet: FleetStatus) -> None:
    out.print(headline(fleet), style="bold")
    _show(node_rows(fleet, time.time()))
    for node in fleet.nodes:
        if node.flag:
            out.print(f"{node.name}: {node.flag}", style="yellow")
    if fleet.refusals:
        out.print(f"requests refused at the gate: {refusals_text(fleet.refusals)}")
    if fleet.restarts:
        out.print(f"restarts of the SuperLink: {fleet.restarts}")


def _show_runs(fleet: FleetStatus) -> None:
    out.print()
    out.print(f"{len(fleet.runs)} runs" if len(fleet.runs) != 1 else "1 run", style="bold")
    _show(run_rows(fleet, MAX_RUNS))
    for run in fleet.runs[:MAX_RUNS]:
        if run.details:
            out.print(f"run {run.id}: {run.details}")


def _show(rows: Sequence[Mapping[str, str]]) -> None:
    """Print a table whose cells are never broken over lines: a name that is too long is cut."""
    if not rows:
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for header in rows[0]:
        least = None if header == "node" else max(len(header), *(len(row[header]) for row in rows))
        justify = "left" if header in WORDS else "right"
        table.add_column(header, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row.values())
    out.print(table)
