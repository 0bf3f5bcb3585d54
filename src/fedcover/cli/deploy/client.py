"""``fedcover deploy client``: a node that joins a server."""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcover._files import make_folder
from fedcover.cli.console import friendly, out, say
from fedcover.cli.deploy.options import InsecureOption, ServerOption, WaitOption, warn_of_expiry
from fedcover.cli.options import CalibrationOption
from fedcover.deploy.address import parse_address
from fedcover.deploy.event_log import EventLog
from fedcover.deploy.node.clock import ServerClock
from fedcover.deploy.processes import keys as key_files
from fedcover.deploy.processes.node_config import budget_config, node_config
from fedcover.deploy.processes.notify import READY, notify_service_manager
from fedcover.deploy.processes.probe import duration, wait_for_server
from fedcover.deploy.processes.signals import stop_signals
from fedcover.deploy.processes.superlink import check_security
from fedcover.errors import check_extra

CLOCK_WARNING = 5.0
"""Seconds by which clocks may differ without a warning."""


@friendly
def client(
    context: typer.Context,
    server: ServerOption,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FOLDER/node-0", help="This node's folder from `deploy keys`.")
    ] = None,
    client: Annotated[int | None, typer.Option("--client", min=0, help="The client's number.")] = None,
    data: Annotated[
        str, typer.Option(metavar="PATH", help="This node's data: a folder of data sets, or an .npz file.")
    ] = "",
    capacity: Annotated[
        float | None, typer.Option(help="The fraction of the model that the node can train, in (0, 1].")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Budget per round, in --budget-unit (instead of --capacity).")
    ] = None,
    unit: Annotated[str, typer.Option("--budget-unit", help="seconds, macs, bytes or parameters.")] = "seconds",
    calibration: CalibrationOption = "",
    share_labels: Annotated[
        bool, typer.Option("--share-labels", help="Report the number of labels of each class to the server.")
    ] = False,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", help="A Python file that the node executes if a run names it.", metavar="FILE.py"),
    ] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the logs.", metavar="DIR")] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds without a connection to the server after which the client ends.")
    ] = 600.0,
    wait: WaitOption = 120.0,
    insecure: InsecureOption = False,
) -> None:
    """Start a node and join a server; it runs until Ctrl-C, SIGTERM, or the server is unreachable for too long.

    The node opens no port. It runs only the fedcover that is installed here, and files named with `--file`; a run
    brings settings and values, never code. Everything after `--` is copied into the node's config, such as
    `-- device=cuda site=berlin`.
    """
    check_extra("flower", "a deployment", "flwr", "cryptography")
    check_security(keys is not None, insecure, "FOLDER/node-0")
    parse_address(server)
    config = node_config(client, data, capacity, context.args, share_labels, files or [])
    config |= budget_config(budget, unit, calibration, capacity)
    node_keys = key_files.node_keys(keys) if keys else None
    if node_keys:
        warn_of_expiry(node_keys.ca)
    from fedcover.deploy.node.fleet import Fleet  # packages that need Flower
    from fedcover.deploy.node.node import serve

    with stop_signals(), ExitStack() as stack:
        ca, clock = node_keys.ca if node_keys else None, ServerClock()
        clock.observe(wait_for_server(server, ca, wait))
        _warn_of_clock(clock.ahead)
        folder = _log_folder(out_dir, stack)
        events = EventLog(folder / "events.jsonl")
        stack.callback(events.close)

        def log(event: str, **fields: Any) -> None:
            events.write(event, **fields)
            if line := _line(event, fields):
                out.print(line)

        def on_joined(node: int) -> None:
            out.print(f"joined {server} as node {node}; log in {events.path}", style="bold")
            notify_service_manager(READY)

        fleet = Fleet(server, ca, node_keys.key if node_keys else None, clock)
        serve(fleet, config, folder, log, wait, patience, on_joined)
    out.print("client stopped")


def _log_folder(path: Path | None, stack: ExitStack) -> Path:
    if path is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedcover-node-")))
    make_folder(path, 0o700)
    return path.absolute()


def _line(event: str, fields: dict[str, Any]) -> str:
    """Return a line about an event for the console; empty for those that are only logged."""
    if event == "reply" and "error" in fields:
        return f"run {fields['run']}: {fields['error']}"
    if event == "reply" and fields["kind"] == "train":
        return f"run {fields['run']}, round {fields['round']}: trained in {fields['seconds']:.1f} s"
    return str(fields["reason"]) if "reason" in fields else ""


def _warn_of_clock(ahead: float) -> None:
    if abs(ahead) > CLOCK_WARNING:
        side = "ahead of" if ahead > 0 else "behind"
        say(
            "warning",
            f"this machine's clock is {duration(ahead)} {side} the server's; requests are sent with the server's time,"
            f" but set the clock: certificates depend on it",
            "yellow",
        )
