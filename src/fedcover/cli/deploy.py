"""``fedcover deploy``: a federation over the network, with Flower's servers and nodes."""

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import friendly, out, say, show_table
from fedcover.cli.options import CalibrationOption, QuietOption
from fedcover.config.schema import read_config
from fedcover.deploy.bandwidth import address_of
from fedcover.deploy.processes import keys as key_files
from fedcover.deploy.processes.environment import program
from fedcover.deploy.processes.flower_app import APPS, write_app
from fedcover.deploy.processes.launch import SuperLink, SuperNode, check_security
from fedcover.deploy.processes.node_config import node_config, spending
from fedcover.deploy.processes.probe import on_loopback, wait_for_answer
from fedcover.deploy.processes.signals import until_asked
from fedcover.deploy.processes.superlink_cli import Control, RunState
from fedcover.errors import FedcoverError, InputError
from fedcover.toml import to_toml

app = typer.Typer(
    no_args_is_help=True, help="Train over the network: keys, a server, clients, and runs, on Flower's SuperLink."
)

InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="No encryption and no keys: for a network that is all yours.")
]
ServerOption = Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where `fedcover deploy server` is.")]
ServerKeysOption = Annotated[
    Path | None, typer.Option("--keys", metavar="FOLDER/server", help="The server's folder of `deploy keys`.")
]
WaitOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for the server at the start.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("keys")
@friendly
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder for the keys.")],
    nodes: Annotated[int, typer.Option(help="How many nodes.")],
    host: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address that nodes reach the server by; repeatable.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificates hold.")] = key_files.DAYS,
    add: Annotated[bool, typer.Option("--add", help="Add so many nodes to a folder that has keys.")] = False,
) -> None:
    """Make an authority, the server's certificate, and a key for each node.

    Example: `fedcover deploy keys keys --nodes 4 --host fl.example.org`
    """
    if add:
        if host:
            raise InputError("--add makes keys of nodes alone; leave out --host, or make new keys in another folder")
        made = key_files.add_nodes(folder, nodes)
        out.print(f"to its node each: {_listed(made)}")
        out.print(f"to the server: the new keys in {folder / 'server' / 'nodes'}, then start it anew to register them")
    else:
        server, *made = key_files.make_keys(folder, nodes, (*key_files.HOSTS, *(host or [])), days)
        out.print(f"to the server: {server}")
        out.print(f"to its node each: {_listed(made)}")
        out.print(f"never leaves this machine: {folder / 'ca.key'}, which neither the server nor a node needs")
    out.print("copy over a connection you trust; node.key and server.key are secrets of one machine each")


@app.command("server")
@friendly
def server(
    keys: ServerKeysOption = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The one port that is used.")] = 8000,
    node: Annotated[
        list[Path] | None, typer.Option("--node", metavar="FILE.pub", help="A node's public key; repeatable.")
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", help="A folder of *.pub; else nodes/ in --keys.", metavar="FOLDER")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Keep state and logs here, for a restart.", metavar="DIR")
    ] = None,
    insecure: InsecureOption = False,
) -> None:
    """Start a server and register its nodes; it goes on until Ctrl-C or SIGTERM, and then ends all it started.

    Whoever can reach the port can start runs, which bring code to every node: keep it on loopback or behind a filter.
    """
    program("flower-superlink")
    check_security(keys is not None, insecure, "FOLDER/server")
    found = key_files.server_keys(keys) if keys else None
    public = _public_keys(node or [], nodes, found)
    with until_asked(), SuperLink(found, out_dir, host, port, insecure) as link:
        if found:
            _warn_of_end(found.certificate)
            for name, number in link.register(public).items():
                out.print(f"node {name} is {number if number is not None else 'registered'}")
        if not on_loopback(host):
            say("warning", f"whoever can reach port {port} can start runs and register nodes; filter it", "yellow")
        how = "--insecure" if insecure else "--keys FOLDER/node-0"
        out.print(f"server at {link.address}; log in {link.log}", style="bold")
        out.print(f"start a client with: fedcover deploy client --server {link.address} {how} --client 0")
        while link.program.code is None:
            time.sleep(0.2)
        raise link.error()
    out.print("server and all it started have ended")


@app.command("client", context_settings={"allow_extra_args": True})
@friendly
def client(
    context: typer.Context,
    server: ServerOption,
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FOLDER/node-0", help="This node's folder of `deploy keys`.")
    ] = None,
    client: Annotated[int | None, typer.Option("--client", min=0, help="Which client of the federation it is.")] = None,
    data: Annotated[str, typer.Option(metavar="FOLDER", help="This node's data: a folder, or a data set's name.")] = "",
    capacity: Annotated[
        float | None, typer.Option(help="The fraction of the model that it can train, in (0, 1].")
    ] = None,
    budget: Annotated[float | None, typer.Option(help="Or: what it can spend in a round, in --unit.")] = None,
    unit: Annotated[str, typer.Option(help="seconds, macs, bytes or parameters.")] = "seconds",
    calibration: CalibrationOption = "",
    share_labels: Annotated[
        bool, typer.Option("--share-labels", help="Tell the server how many labels of each class there are here.")
    ] = False,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Keep the log here.", metavar="DIR")] = None,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without the server after which it gives up.")] = 600.0,
    wait: WaitOption = 120.0,
    insecure: InsecureOption = False,
) -> None:
    """Start a node and join a server; it goes on until Ctrl-C, SIGTERM, or the server is gone for too long.

    What is behind `--` goes to the node's config as it is, such as `-- device=cuda site=berlin`.
    """
    program("flower-supernode")
    check_security(keys is not None, insecure, "FOLDER/node-0")
    address_of(server)
    config = node_config(client, data, capacity, context.args, share_labels) | spending(
        budget, unit, calibration, capacity
    )
    found = key_files.node_keys(keys) if keys else None
    if found:
        _warn_of_end(found.ca)
    with until_asked(), SuperNode(server, found, config, out_dir, insecure, patience, wait) as node:
        out.print(f"joined {server} as node {node.join()}; log in {node.log}", style="bold")
        raise node.follow(out.print)
    out.print("node and all it started have ended")


@app.command("run")
@friendly
def run(
    config: Annotated[Path, typer.Argument(help="Settings in TOML.")],
    server: ServerOption,
    out_dir: Annotated[Path, typer.Option("--out", help="Run folder on the server's machine.", metavar="DIR")],
    keys: ServerKeysOption = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change one setting, such as local.lr=0.1.", metavar="KEY=VALUE")
    ] = None,
    data: Annotated[
        str, typer.Option(metavar="DIR", help="Data sets on the server's machine; else its FEDCOVER_DATA.")
    ] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    wait: WaitOption = 120.0,
    insecure: InsecureOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train over the nodes that are online, and follow it; exits with 0 only if the run got to its end.

    Ctrl-C stops the run on the server; `--resume` goes on from its last checkpoint.
    """
    program("flwr")
    wanted = read_config(config, set_ or [])
    policy = {"name": wanted.policy.name, **wanted.policy.choice.settings}
    settings = to_toml({**wanted.model_dump(), "policy": policy})
    with _connected(server, keys, insecure, wait) as control:
        state = submit(control, settings, out_dir, resume, quiet, data=data)
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
    """Which nodes are online, and how runs stand.

    Only a run asks nodes which client they are: with `--run`, its folder on the server's machine, that is shown too.
    """
    program("flwr")
    from fedcover.deploy.flower.registry_file import nodes_in  # a package that needs Flower

    clients = nodes_in(run_dir) if run_dir else {}
    with _connected(server, keys, insecure) as control:
        nodes, runs = control.nodes(), control.runs()
    if as_json:
        told = [vars(node) | ({"client": clients.get(node.id)} if run_dir else {}) for node in nodes]
        out.print_json(json.dumps({"nodes": told, "runs": [vars(run) for run in runs]}))
        return
    out.print(f"{sum(node.online for node in nodes)} of {len(nodes)} nodes online")
    if nodes:
        show_table(
            [
                {
                    **({"client": str(clients.get(node.id, ""))} if run_dir else {}),
                    "node": str(node.id),
                    "status": node.status,
                    "since": node.since,
                }
                for node in nodes
            ]
        )
    out.print(f"{len(runs)} runs" if len(runs) != 1 else "1 run")
    if runs:
        show_table(
            [
                {"run": str(r.id), "status": r.status, "seconds": f"{r.seconds:.1f}", "from": r.since, "why": r.details}
                for r in runs
            ]
        )


def submit(
    control: Control,
    settings: str,
    where: Path,
    resume: bool = False,
    quiet: bool = False,
    apps: str = APPS,
    data: str = "",
) -> RunState:
    """How a run of settings in TOML ended; it is followed to its end, and stopped if this is interrupted."""
    config = {
        "settings": settings,
        "out": str(where.absolute()),
        "data": str(Path(data).absolute()) if data else "",
        "resume": "true" if resume else "",
    }
    with tempfile.TemporaryDirectory(prefix="fedcover-app-") as folder, until_asked(leave=False) as asked:
        asked.later = True  # or a run would go on of which nobody knows the number
        number = control.run(write_app(folder, apps), config)
        asked.later = False
        if not quiet:
            out.print(f"run {number} at {control.address}", style="bold")
        try:
            asked.check()
            return control.follow(number, on_line=lambda line: None if quiet else out.print(line))
        except KeyboardInterrupt:
            if not quiet:
                out.print(f"stopping run {number}")
            control.stop(number)
            raise


@contextmanager
def _connected(server: str, keys: Path | None, insecure: bool, wait: float = 0.0) -> Iterator[Control]:
    check_security(keys is not None, insecure, "FOLDER/server")
    ca = key_files.authority(keys) if keys else None
    wait_for_answer(server, ca, wait)
    with Control(server, ca) as control:
        yield control


def _public_keys(single: list[Path], folder: Path | None, keys: key_files.ServerKeys | None) -> list[Path]:
    if folder is None and not single:
        return list(keys.nodes) if keys else []
    found = key_files.public_keys(folder) if folder else []
    if folder and not found:
        raise InputError(f"{folder} has no *.pub; name the folder `nodes` that `fedcover deploy keys` made")
    if keys is None:
        raise InputError("with --insecure any node may join, so keys mean nothing; leave out --node and --nodes")
    return [*single, *found]


def _listed(folders: list[Path]) -> str:
    names = [str(folder) for folder in folders]
    return ", ".join(names if len(names) <= 4 else [names[0], "...", names[-1]])


def _warn_of_end(certificate: Path) -> None:
    days = key_files.check_certificate(certificate)
    if days < key_files.SOON:
        say("warning", f"{certificate} expires in {days} days; make new keys before that", "yellow")
