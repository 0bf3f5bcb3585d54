"""``fedcover deploy doctor``: check a server's or a node's machine, and print what to do."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedcover.cli.console import FAILED, friendly, out
from fedcover.cli.deploy.options import STATE, InsecureOption
from fedcover.cli.options import JsonOption
from fedcover.deploy.address import LOOPBACK_HOST, parse_address
from fedcover.deploy.processes.superlink import check_security
from fedcover.errors import InputError, check_extra

if TYPE_CHECKING:
    from fedcover.deploy.doctor.findings import Finding

PORT = 8000
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


@friendly
def doctor(
    server: Annotated[
        str, typer.Option("--server", metavar="HOST:PORT", help="On a node: the address of its server.")
    ] = "",
    keys: Annotated[
        Path | None, typer.Option("--keys", metavar="FOLDER", help="This machine's folder from `deploy keys`.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option("--state", metavar="DIR", help="On a server: its folder; `state` by default.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="On a server: the address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="On a server: the port that nodes reach.")] = None,
    running: Annotated[
        bool, typer.Option("--running", help="On a server: it is a problem if the server does not run.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE.toml", help="Settings of a run, to load its data set.")
    ] = None,
    data: Annotated[str, typer.Option(metavar="PATH", help="Folder of data sets; on a node also an .npz file.")] = "",
    client: Annotated[int | None, typer.Option("--client", min=0, help="On a node: the client's number.")] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option("--file", help="On a node: a Python file that it may execute; repeatable.", metavar="FILE.py"),
    ] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="On a node: the folder of logs.", metavar="DIR")] = None,
    insecure: InsecureOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check this machine before or while a server or, with `--server`, a node runs on it; nothing is changed.

    Each line has a remedy if something is wrong. The exit code is 0 only if there is no problem; warnings do not count.

    Example: `fedcover deploy doctor --server fl.example.org:8000 --keys keys/node-0`
    """
    check_extra("flower", "a deployment", "flwr", "cryptography")
    check_security(keys is not None, insecure, "FOLDER/node-0" if server else "FOLDER/server")
    if server:
        _refuse({"--state": state, "--host": host, "--port": port, "--running": running}, "a node, as --server says")
        parse_address(server)
        from fedcover.deploy.doctor.node import NodeEnd, examine_node  # packages that need Flower

        findings = examine_node(NodeEnd(server, keys, client or 0, data, files or [], config, out_dir))
    else:
        _refuse({"--client": client, "--file": files, "--out": out_dir}, "a server; for a node, give --server")
        from fedcover.deploy.doctor.server import ServerEnd, examine_server

        end = ServerEnd(keys, state or STATE, host or LOOPBACK_HOST, port or PORT, config, data, running)
        findings = examine_server(end)
    if as_json:
        out.print_json(json.dumps([asdict(finding) for finding in findings]))
    else:
        _show(findings)
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(FAILED)


def _refuse(options: dict[str, object], end: str) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise InputError(f"{name} has no effect on {end}; leave it out")


def _show(findings: "list[Finding]") -> None:
    for finding in findings:
        out.print(f"{finding.level:<8}", style=STYLES[finding.level], end="")
        out.print(f"{finding.subject}: {finding.text}")
    problems, warnings = (sum(finding.level == level for finding in findings) for level in ("problem", "warning"))
    if problems:
        out.print(f"{problems} problem{'s' if problems != 1 else ''}: see the remedies above")
    else:
        out.print("no problem" + (f", {warnings} warning{'s' if warnings != 1 else ''}" if warnings else ""))
