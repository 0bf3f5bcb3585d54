"""``fedcover deploy server``: the SuperLink, and the gate that nodes reach."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import friendly, out
from fedcover.cli.deploy.options import STATE, InsecureOption, StateOption, warn_of_expiry
from fedcover.deploy.processes import keys as key_files
from fedcover.deploy.processes.environment import find_program
from fedcover.deploy.processes.notify import READY, notify_service_manager
from fedcover.deploy.processes.signals import stop_signals
from fedcover.deploy.processes.superlink import check_security
from fedcover.errors import InputError, check_extra


@friendly
def server(
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FOLDER/server", help="The server's folder from `deploy keys`.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port that nodes reach.")] = 8000,
    node: Annotated[
        list[Path] | None, typer.Option("--node", metavar="FILE.pub", help="A node's public key; repeatable.")
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", help="A folder of *.pub instead of nodes/ in --keys.", metavar="FOLDER")
    ] = None,
    state: StateOption = STATE,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port on 127.0.0.1 that serves /metrics for Prometheus; none by default."),
    ] = None,
    insecure: InsecureOption = False,
) -> None:
    """Start a server for nodes; it runs until Ctrl-C or SIGTERM, and then ends all that it started.

    Nodes reach only a gate, which forwards what nodes need. Runs are started on this machine, with `deploy run`. The
    folder of public keys is followed: a key that is added can join, and one that is removed is refused at once.
    """
    check_extra("flower", "a deployment", "flwr", "cryptography")
    find_program("flower-superlink")
    check_security(keys is not None, insecure, "FOLDER/server")
    server_keys = key_files.server_keys(keys) if keys else None
    from fedcover.deploy.gate.allowed_keys import AllowedKeys  # packages that need Flower
    from fedcover.deploy.processes.server import Server
    from fedcover.deploy.status.metrics_server import MetricsServer

    allowed = None
    if server_keys is None:
        if node or nodes:
            raise InputError("with --insecure any node can join, and keys have no effect; leave out --node and --nodes")
    else:
        folder = nodes or (None if node else server_keys.ca.parent / "nodes")
        if nodes and not key_files.public_keys(nodes):
            raise InputError(f"{nodes} has no *.pub; name the folder `nodes` that `fedcover deploy keys` created")
        allowed = AllowedKeys(folder, _existing(node or []))
        warn_of_expiry(server_keys.certificate)
    with stop_signals(), ExitStack() as stack:
        running = stack.enter_context(closing(Server(server_keys, state, host, port, allowed, out.print)))
        if metrics_port:
            metrics = stack.enter_context(closing(MetricsServer(metrics_port, lambda: running.publisher.latest)))
            out.print(f"metrics at {metrics.url}")
        security = "--insecure" if insecure else "--keys FOLDER/node-0"
        out.print(f"server at {running.address}; log in {running.log.path}", style="bold")
        out.print(f"start a client with: fedcover deploy client --server {running.address} {security} --client 0")
        notify_service_manager(READY)
        running.watch()
    out.print("server stopped")


def _existing(files: list[Path]) -> list[Path]:
    for path in files:
        if not path.is_file():
            raise InputError(f"there is no public key {path}; name a node.pub that `fedcover deploy keys` created")
    return files
