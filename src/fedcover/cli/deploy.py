"""``fedcover deploy``: a federation over the network, with Flower's servers and nodes."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import RESUMABLE, friendly, out, say, show_table
from fedcover.cli.options import CalibrationOption, JsonOption, QuietOption
from fedcover.config.schema import read_config
from fedcover.deploy.address import on_loopback, parse_address
from fedcover.deploy.own_files import absolute_files
from fedcover.deploy.processes import keys as key_files
from fedcover.deploy.processes.environment import find_program
from fedcover.deploy.processes.flower_app import APPS, write_app
from fedcover.deploy.processes.launch import SuperLink, SuperNode, check_security
from fedcover.deploy.processes.node_config import budget_config, node_config
from fedcover.deploy.processes.probe import wait_for_server
from fedcover.deploy.processes.signals import stop_signals
from fedcover.deploy.processes.superlink_cli import Control, Node, RunState
from fedcover.errors import FedcoverError, InputError
from fedcover.toml import to_toml

app = typer.Typer(
    no_args_is_help=True, help="Train over the network with Flower: create keys, start servers and clients, run."
)

InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Use no encryption and no keys; only for a network that only you use.")
]
ServerOption = Annotated[
    str, typer.Option("--server", metavar="HOST:PORT", help="Address of the `fedcover deploy server`.")
]
ServerKeysOption = Annotated[
    Path | None, typer.Option("--keys", metavar="FOLDER/server", help="The server's folder from `deploy keys`.")
]
WaitOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for the server at the start.")]


@app.command("keys")
@friendly
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder for the keys.")],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address under which nodes reach the server; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = key_files.DAYS,
    add: Annotated[bool, typer.Option("--add", help="Add nodes to a folder that has keys.")] = False,
) -> None:
    """Create an authority, the server's certificate, and a key for each node.

    Example: `fedcover deploy keys keys --nodes 4 --host fl.example.org`
    """
    if add:
        if host:
            raise InputError(
                "--add creates only node keys; leave out --host, or create new keys in another folder for a new host"
            )
        node_folders = key_files.add_nodes(folder, nodes)
        out.print(f"copy each to its node: {_shorten(node_folders)}")
        out.print(f"copy the new keys in {folder / 'server' / 'nodes'} to the server, and restart it to register them")
    else:
        server, *node_folders = key_files.make_keys(folder, nodes, (*key_files.HOSTS, *(host or [])), days)
        out.print(f"copy to the server: {server}")
        out.print(f"copy each to its node: {_shorten(node_folders)}")
        out.print(f"keep on this machine: {folder / 'ca.key'}, which neither the server nor a node needs")
    out.print("use a connection you trust: node.key and server.key are secrets of one machine each")


@app.command("server")
@friendly
def server(
    keys: ServerKeysOption = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on; no other is used.")] = 8000,
    node: Annotated[
        list[Path] | None, typer.Option("--node", metavar="FILE.pub", help="A node's public key; repeatable.")
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", help="A folder of *.pub instead of nodes/ in --keys.", metavar="FOLDER")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Folder for state and logs, for a restart.", metavar="DIR")
    ] = None,
    insecure: InsecureOption = False,
) -> None:
    """Start a server and register its nodes; it runs until Ctrl-C or SIGTERM, and then ends all that it started.

    Anyone who can reach the port can start runs, which bring code to every node: keep it on loopback or behind a
    firewall.
    """
    find_program("flower-superlink")
    check_security(keys is not None, insecure, "FOLDER/server")
    server_keys = key_files.server_keys(keys) if keys else None
    public_keys = _public_keys(node or [], nodes, server_keys)
    with stop_signals(), closing(SuperLink(server_keys, out_dir, host, port, insecure)) as link:
        if server_keys:
            _warn_of_expiry(server_keys.certificate)
            for name, number in link.register(public_keys).items():
                out.print(f"node {name} is {number if number is not None else 'registered'}")
        if not on_loopback(host):
            say("warning", f"anyone who can reach port {port} can start runs and register nodes; filter it", "yellow")
        security = "--insecure" if insecure else "--keys FOLDER/node-0"
        out.print(f"server at {link.address}; log in {link.log}", style="bold")
        out.print(f"start a client with: fedcover deploy client --server {link.address} {security} --client 0")
        while link.program.code is None:
            time.sleep(0.2)
        raise link.error()
    out.print("server stopped")


@app.command("client", context_settings={"allow_extra_args": True})
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
    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the log.", metavar="DIR")] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="Seconds without a connection to the server after which the client ends.")
    ] = 600.0,
    wait: WaitOption = 120.0,
    insecure: InsecureOption = False,
) -> None:
    """Start a node and join a server; it runs until Ctrl-C, SIGTERM, or the server is unreachable for too long.

    Everything after `--` is copied into the node's config, such as `-- device=cuda site=berlin`.
    """
    find_program("flower-supernode")
    check_security(keys is not None, insecure, "FOLDER/node-0")
    parse_address(server)
    config = node_config(client, data, capacity, context.args, share_labels, files or [])
    config |= budget_config(budget, unit, calibration, capacity)
    node_keys = key_files.node_keys(keys) if keys else None
    if node_keys:
        _warn_of_expiry(node_keys.ca)
    with stop_signals(), closing(SuperNode(server, node_keys, config, out_dir, insecure, patience, wait)) as node:
        out.print(f"joined {server} as node {node.join()}; log in {node.log}", style="bold")
        raise node.follow(out.print)
    out.print("client stopped")


@app.command("run")
@partial(friendly, interrupted=RESUMABLE)
def run(
    config: Annotated[Path, typer.Argument(help="Settings in TOML.")],
    server: ServerOption,
    out_dir: Annotated[Path, typer.Option("--out", help="Run folder on the server's machine.", metavar="DIR")],
    keys: ServerKeysOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting, such as local.lr=0.1.", metavar="KEY=VALUE")
    ] = None,
    data: Annotated[
        str,
        typer.Option(metavar="DIR", help="Folder of data sets on the server's machine; by default its FEDCOVER_DATA."),
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    wait: WaitOption = 120.0,
    insecure: InsecureOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train on the nodes that are online and follow the run; the exit code is 0 only if it completes.

    Ctrl-C stops the run on the server; `--resume` continues from its last checkpoint.
    """
    find_program("flwr")
    settings = read_config(config, set_ or [])
    text = to_toml(absolute_files(settings.complete()))
    with _connect(server, keys, insecure, wait) as control:
        state = submit(control, text, out_dir, resume, quiet, data=data)
    if not state.completed:
        raise FedcoverError(f"the run {state.status.removeprefix('finished:')}: {state.details or 'see its log'}")
    if not quiet:
        out.print(f"completed in {state.seconds:.1f} s; run folder {out_dir.absolute()}")


@app.command("status")
@friendly
def status(
    server: ServerOption,
    keys: ServerKeysOption = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run", help="A run's folder: show which client each node is.", metavar="DIR")
    ] = None,
    insecure: InsecureOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which nodes are online, and the state of all runs.

    Only a run records which client each node is: `--run` names its folder on the server's machine.
    """
    find_program("flwr")
    from fedcover.deploy.flower.registry_file import clients_by_node  # a package that needs Flower

    clients = clients_by_node(run_dir) if run_dir else None
    with _connect(server, keys, insecure) as control:
        nodes, runs = control.nodes(), control.runs()
    if as_json:
        rows = [vars(node) | ({} if clients is None else {"client": clients.get(node.id)}) for node in nodes]
        out.print_json(json.dumps({"nodes": rows, "runs": [vars(run) for run in runs]}))
        return
    _show_nodes(nodes, clients)
    _show_runs(runs)


def _show_nodes(nodes: list[Node], clients: dict[int, int] | None) -> None:
    out.print(f"{sum(node.online for node in nodes)} of {len(nodes)} nodes online")
    rows = [{"node": str(node.id), "status": node.status, "since": node.since} for node in nodes]
    if clients is not None:
        rows = [{"client": str(clients.get(node.id, "")), **row} for node, row in zip(nodes, rows, strict=True)]
    if rows:
        show_table(rows)


def _show_runs(runs: list[RunState]) -> None:
    out.print(f"{len(runs)} runs" if len(runs) != 1 else "1 run")
    if runs:
        show_table(
            [
                {
                    "run": str(state.id),
                    "status": state.status,
                    "seconds": f"{state.seconds:.1f}",
                    "from": state.since,
                    "details": state.details,
                }
                for state in runs
            ]
        )


def submit(
    control: Control,
    settings: str,
    run_folder: Path,
    resume: bool = False,
    quiet: bool = False,
    apps: str = APPS,
    data: str = "",
) -> RunState:
    """Start a run, follow it to its end, and return its final state; stop it if this process is interrupted.

    Args:
        control: The connection to the SuperLink.
        settings: The settings as TOML.
        run_folder: The run folder on the server's machine.
        resume: Continue the run in ``run_folder``.
        quiet: Print nothing.
        apps: The module of the ServerApp and the ClientApp.
        data: The folder of the server's data sets; empty for the default.
    """
    config = {
        "settings": settings,
        "out": str(run_folder.absolute()),
        "data": str(Path(data).absolute()) if data else "",
        "resume": "true" if resume else "",
    }
    with tempfile.TemporaryDirectory(prefix="fedcover-app-") as folder, stop_signals(leave=False) as stop:
        stop.deferred = True  # until the run's number is available, which is needed to stop it
        number = control.run(write_app(folder, apps), config)
        stop.deferred = False
        if not quiet:
            out.print(f"run {number} at {control.address}", style="bold")
        try:
            stop.check()
            return control.follow(number, on_line=lambda line: None if quiet else out.print(line))
        except KeyboardInterrupt:
            if not quiet:
                out.print(f"stopping run {number}")
            control.stop(number)
            raise


@contextmanager
def _connect(server: str, keys: Path | None, insecure: bool, wait: float = 0.0) -> Iterator[Control]:
    check_security(keys is not None, insecure, "FOLDER/server")
    ca = key_files.authority_certificate(keys) if keys else None
    wait_for_server(server, ca, wait)
    with closing(Control(server, ca)) as control:
        yield control


def _public_keys(files: list[Path], folder: Path | None, keys: key_files.ServerKeys | None) -> list[Path]:
    if folder is None and not files:
        return list(keys.nodes) if keys else []
    in_folder = key_files.public_keys(folder) if folder else []
    if folder and not in_folder:
        raise InputError(f"{folder} has no *.pub; name the folder `nodes` that `fedcover deploy keys` created")
    if keys is None:
        raise InputError("with --insecure any node can join, and keys have no effect; leave out --node and --nodes")
    return [*files, *in_folder]


def _shorten(folders: list[Path]) -> str:
    names = [str(folder) for folder in folders]
    return ", ".join(names if len(names) <= 4 else [names[0], "...", names[-1]])


def _warn_of_expiry(certificate: Path) -> None:
    days = key_files.check_certificate(certificate)
    if days < key_files.EXPIRY_WARNING_DAYS:
        say("warning", f"{certificate} expires in {days} days; create new keys before that", "yellow")
