"""Checks of the machine of a server: keys, port, folder, disk, memory, versions and data."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedcover.config.schema import read_config
from fedcover.config.task_and_data import load_data
from fedcover.deploy.address import check_port_free
from fedcover.deploy.doctor.certificates import check_chain, check_hosts, check_node_files, expiry_finding
from fedcover.deploy.doctor.findings import Finding, check
from fedcover.deploy.doctor.machine import GIB, check_folder, check_memory, check_secret, clock_finding
from fedcover.deploy.processes.environment import find_program
from fedcover.deploy.processes.keys import ServerKeys, server_keys
from fedcover.deploy.processes.probe import NoResponseError, check_server
from fedcover.deploy.processes.server import ADDRESS_FILE, ServerAddress
from fedcover.deploy.versions import installed_versions, versions_text
from fedcover.errors import FedcoverError, InputError

LEAST_DISK = 1 * GIB
"""Free bytes that the folder of a server needs at least: messages are stored there until they are delivered."""


@dataclass(frozen=True)
class ServerEnd:
    """A server that is to be started, or runs."""

    keys: Path | None
    """The folder of its keys; None without encryption."""
    state: Path
    host: str
    port: int
    config: Path | None = None
    """Settings of a run; the data set that they name must be there."""
    data: str = ""
    """The folder of data sets; empty for the usual places."""
    must_run: bool = False
    """Whether it is a problem that the server does not run."""


def examine_server(end: ServerEnd) -> list[Finding]:
    """Return the findings on the machine of a server."""
    return [
        check("versions", _versions),
        *(_keys_findings(end.keys, end.host) if end.keys else ()),
        check("server", partial(_server_state, end)),
        check("state", partial(check_folder, end.state, LEAST_DISK)),
        check("memory", check_memory),
        clock_finding(),
        *([check("data", partial(_check_data, end.config, end.data))] if end.config else ()),
    ]


def _versions() -> str:
    find_program("flower-superlink")
    return versions_text(installed_versions())


def _keys_findings(folder: Path, host: str) -> list[Finding]:
    try:
        keys: ServerKeys = server_keys(folder)
    except InputError as error:
        return [Finding("problem", "keys", str(error))]
    return [
        check("keys", partial(check_chain, keys)),
        expiry_finding(keys.certificate),
        check("hosts", partial(check_hosts, keys.certificate, host)),
        check("secret", partial(check_secret, keys.key)),
        check("nodes", partial(check_node_files, folder / "nodes")),
    ]


def _server_state(end: ServerEnd) -> str:
    """Return whether a server runs; raise an error if it does not respond, or if it could not be started."""
    free = f"none runs; {end.host}:{end.port} is free"
    if not (end.state / ADDRESS_FILE).exists():
        if end.must_run:
            raise InputError(f"no server runs with the folder {end.state}; start one with `fedcover deploy server`")
        check_port_free(end.host, end.port)
        return free
    address = ServerAddress.read(end.state)
    try:
        check_server(address.gate, Path(address.ca) if address.ca else None)
    except FedcoverError as error:
        if isinstance(error, NoResponseError) and not end.must_run:
            check_port_free(end.host, end.port)
            return f"{free}; the last one was killed"
        raise InputError(
            f"{end.state / ADDRESS_FILE} names a server at {address.gate}, process {address.pid}, but: {error}"
        ) from None
    return f"it runs and responds at {address.gate}"


def _check_data(config: Path, folder: str) -> str:
    """Return a sentence on the data set of a run; raise InputError unless the server can load it."""
    settings = read_config(config, [])
    train = load_data(settings, folder or None).train
    return f"{settings.data.name} has {len(train):,} examples"
