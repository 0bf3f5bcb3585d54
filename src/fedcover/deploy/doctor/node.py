"""Checks of the machine of a node: keys, the way to the server, the clock, versions, disk, memory and data."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fedcover.deploy.doctor.certificates import check_node_pair, expiry_finding
from fedcover.deploy.doctor.findings import Finding, check
from fedcover.deploy.doctor.machine import GIB, check_folder, check_memory, check_secret
from fedcover.deploy.gate.refusals import REVOKED_HEADER
from fedcover.deploy.node.clock import ServerClock
from fedcover.deploy.node.fleet import read_key
from fedcover.deploy.node.signature import signed_headers
from fedcover.deploy.processes.keys import NodeKeys, node_keys
from fedcover.deploy.processes.probe import check_server, duration
from fedcover.deploy.versions import (
    VERSIONS_HEADER,
    differing_versions,
    installed_versions,
    parse_versions,
    versions_text,
    wrong_versions,
)
from fedcover.errors import FedcoverError, InputError

LEAST_DISK = GIB // 8
"""Free bytes that the folder of a node's logs needs at least; they are rotated."""
CLOCK_LIMIT = 5.0
"""Seconds by which the clocks of a node and its server may differ."""


@dataclass(frozen=True)
class NodeEnd:
    """A node that is to be started, or runs."""

    server: str
    """The server's HOST:PORT."""
    keys: Path | None
    """The folder of its keys; None without encryption."""
    client: int = 0
    """The number of its client."""
    data: str = ""
    """A folder of data sets, or an .npz file; empty for the usual places."""
    files: Sequence[Path] = ()
    """Python files that it may execute."""
    config: Path | None = None
    """Settings of a run that it must be able to serve."""
    out: Path | None = None
    """The folder of its logs; None for a temporary one."""


def examine_node(end: NodeEnd) -> list[Finding]:
    """Return the findings on the machine of a node."""
    if end.keys is None:
        return [*_connection(end.server, None), *_machine(end)]
    try:
        keys = node_keys(end.keys)
    except InputError as error:
        return [Finding("problem", "keys", str(error)), *_machine(end)]
    pair, secret = check("keys", partial(check_node_pair, keys)), check("secret", partial(check_secret, keys.key))
    own = [pair, expiry_finding(keys.ca), secret]
    return [*own, *_connection(end.server, keys), *_machine(end)]


def _connection(server: str, keys: NodeKeys | None) -> list[Finding]:
    """Return the findings on the way to the server: whether it responds, its clock, and what it knows of this node."""
    ca, clock = keys.ca if keys else None, ServerClock()
    try:
        clock.observe(check_server(server, ca))
        signed = signed_headers(read_key(keys.key), clock.now()) if keys else {}
        headers = check_server(server, ca, signed)
    except FedcoverError as error:
        return [Finding("problem", "server", str(error))]
    return [
        Finding("ok", "server", f"it responds at {server}" + (" with the right certificate" if keys else "")),
        check("clock", lambda: _check_clock(clock.ahead)),
        *([check("registered", lambda: _check_registered(headers, server))] if keys else ()),
        _version_finding(headers),
    ]


def _check_clock(ahead: float) -> str:
    if abs(ahead) > CLOCK_LIMIT:
        side = "ahead of" if ahead > 0 else "behind"
        raise InputError(
            f"this machine's clock is {duration(ahead)} {side} the server's; set the one that is wrong, for example"
            f" with `timedatectl set-ntp true`"
        )
    return f"{abs(ahead):.1f} s from the server's"


def _check_registered(headers: dict[str, str], server: str) -> str:
    if REVOKED_HEADER in headers:
        raise InputError(
            f"the server at {server} does not accept this node's key: it was never registered there, or it was revoked;"
            f" copy node.pub into the folder `nodes` of the server's keys, under this node's name"
        )
    if VERSIONS_HEADER not in headers:
        raise InputError(f"the server at {server} does not answer for keys; install the same fedcover there")
    return "the server accepts this node's key"


def _version_finding(headers: dict[str, str]) -> Finding:
    own, server = installed_versions(), parse_versions(headers.get(VERSIONS_HEADER, ""))
    if wrong := wrong_versions(own, server):
        return Finding("problem", "versions", "; ".join(wrong))
    if other := differing_versions(own, server):
        text = f"{', '.join(other)}; runs work, but are not bit-identical to those with equal versions"
        return Finding("warning", "versions", text)
    same = ", as on the server" if server else "; those of the server are unknown"
    return Finding("ok", "versions", versions_text(own) + same)


def _machine(end: NodeEnd) -> list[Finding]:
    folder = end.out or Path(tempfile.gettempdir())
    return [
        check("logs", partial(check_folder, folder, LEAST_DISK)),
        check("memory", check_memory),
        *(check("file", partial(_check_file, file)) for file in end.files),
        *([check("data", partial(_check_data, end))] if end.data or end.config else ()),
    ]


def _check_file(file: Path) -> str:
    try:
        compile(file.read_bytes(), str(file), "exec")
    except (OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{file} is not a Python file that can be read ({error}); copy it again") from None
    return f"{file.name} can be read"


def _check_data(end: NodeEnd) -> str:
    """Return a sentence on the node's data; raise InputError unless they are there and fit the settings, if any."""
    if end.data and not Path(end.data).exists():
        raise InputError(f"there is no {end.data}; give --data with a folder of data sets or an .npz file")
    if end.config is None:
        return f"{end.data} is there; give --config with the settings of a run to load it"
    from fedcover.config.schema import read_config
    from fedcover.deploy.node.configured_client import local_client
    from fedcover.deploy.own_files import settings_of_node
    from fedcover.toml import to_toml

    text = to_toml(read_config(end.config, []).complete())
    own = settings_of_node(text, end.files, {}, needs_policy=False)  # the digests are the server's
    examples = local_client(own, end.data or None, end.client).examples
    return f"client {end.client} has {len(examples):,} examples"
