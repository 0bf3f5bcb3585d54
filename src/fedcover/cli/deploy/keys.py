"""``fedcover deploy keys``: create, add, replace and revoke keys."""

from pathlib import Path
from typing import Annotated

import typer

from fedcover.cli.console import friendly, out
from fedcover.deploy.processes import keys as key_files
from fedcover.errors import InputError


@friendly
def keys(
    folder: Annotated[Path, typer.Argument(help="The folder of the keys.")],
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="A name or address under which nodes reach the server; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days for which the certificates are valid.")] = key_files.DAYS,
    add: Annotated[bool, typer.Option("--add", help="Add nodes to a folder that has keys.")] = False,
    rotate: Annotated[
        str, typer.Option("--rotate", metavar="NODE", help="Replace the key of a node, such as node-3.")
    ] = "",
    revoke: Annotated[
        str, typer.Option("--revoke", metavar="NODE", help="Remove the public key of a node, such as node-3.")
    ] = "",
) -> None:
    """Create an authority, the server's certificate, and a key for each node; later add, replace or revoke keys.

    A running server follows the folder `nodes` of its keys: what is added there can join within seconds, and what is
    removed is refused at once.

    Example: `fedcover deploy keys keys --nodes 4 --host fl.example.org`
    """
    if sum(map(bool, (add, rotate, revoke))) > 1:
        raise InputError("--add, --rotate and --revoke exclude each other; give one of them")
    if (add or rotate or revoke) and host:
        raise InputError("--host belongs to the server's certificate; leave it out, or create new keys elsewhere")
    if rotate:
        node = key_files.rotate_node(folder, rotate)
        out.print(f"copy to the node, and start it again: {node}")
        _say_follow(folder)
    elif revoke:
        out.print(f"removed {key_files.revoke_node(folder, revoke)}")
        _say_follow(folder)
    elif nodes is None:
        raise InputError("--nodes is missing; give the number of nodes")
    elif add:
        node_folders = key_files.add_nodes(folder, nodes)
        out.print(f"copy each to its node: {_shorten(node_folders)}")
        _say_follow(folder)
    else:
        server, *node_folders = key_files.make_keys(folder, nodes, (*key_files.HOSTS, *(host or [])), days)
        out.print(f"copy to the server: {server}")
        out.print(f"copy each to its node: {_shorten(node_folders)}")
        out.print(f"keep on this machine: {folder / 'ca.key'}, which neither the server nor a node needs")
    if not revoke:
        out.print("use a connection you trust: node.key and server.key are secrets of one machine each")


def _say_follow(folder: Path) -> None:
    out.print(
        f"a server that runs with {folder / 'server'} follows by itself; if the server has a copy, bring"
        f" {folder / 'server' / 'nodes'} there to the same state"
    )


def _shorten(folders: list[Path]) -> str:
    names = [str(folder) for folder in folders]
    return ", ".join(names if len(names) <= 4 else [names[0], "...", names[-1]])
