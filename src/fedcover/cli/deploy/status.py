"""``fedcover deploy status``: which nodes are online, and the state of all runs."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcover.cli.console import friendly, out, show_table
from fedcover.cli.deploy.options import STATE, StateOption
from fedcover.cli.options import JsonOption
from fedcover.errors import check_extra

if TYPE_CHECKING:
    from fedcover.deploy.processes.control import RegisteredNode, RunState


@friendly
def status(
    state: StateOption = STATE,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="A run's folder: show which client each node is.", metavar="DIR")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show which nodes are online, and the state of all runs.

    Only a run records which client each node is: `--run` names its folder.
    """
    check_extra("flower", "a deployment", "flwr")
    from fedcover.deploy.flower.registry_file import clients_by_node  # packages that need Flower
    from fedcover.deploy.processes.server import ServerAddress

    clients = clients_by_node(run_dir) if run_dir else None
    with closing(ServerAddress.read(state).connect()) as control:
        nodes, runs = control.nodes(), control.runs()
    if as_json:
        rows = [_plain(node) | ({} if clients is None else {"client": clients.get(node.id)}) for node in nodes]
        out.print_json(json.dumps({"nodes": rows, "runs": [vars(run) for run in runs]}))
        return
    _show_nodes(nodes, clients)
    _show_runs(runs)


def _plain(node: "RegisteredNode") -> dict[str, object]:
    return {"id": node.id, "name": node.name, "status": node.status, "since": node.since}


def _show_nodes(nodes: "list[RegisteredNode]", clients: dict[int, int] | None) -> None:
    out.print(f"{sum(node.online for node in nodes)} of {len(nodes)} nodes online")
    rows = [{"node": node.name or str(node.id), "status": node.status, "since": node.since} for node in nodes]
    if clients is not None:
        rows = [{"client": str(clients.get(node.id, "")), **row} for node, row in zip(nodes, rows, strict=True)]
    if rows:
        show_table(rows)


def _show_runs(runs: "list[RunState]") -> None:
    out.print(f"{len(runs)} runs" if len(runs) != 1 else "1 run")
    rows = [
        {"run": str(run.id), "status": run.status, "seconds": f"{run.seconds:.1f}", "from": run.since} for run in runs
    ]
    if rows:
        show_table(rows)
    for run in runs:
        if run.details:
            out.print(f"run {run.id}: {reason_of(run)}")


def reason_of(run: "RunState") -> str:
    """Return why a run failed, without the words that Flower puts before an error; empty if it did not fail."""
    return run.details.removeprefix("ServerApp failed with exception: ")
