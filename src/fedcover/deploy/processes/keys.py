"""The keys of a federation: an authority, the server's certificate, and one key for each node.

    FOLDER/ca.key             signs the server's certificate; stays here, neither the server nor a node needs it
    FOLDER/ca.crt             the certificate that everyone trusts; not a secret
    FOLDER/server/            copied to the server: ca.crt, server.crt, server.key, nodes/node-0.pub ...
    FOLDER/node-0/            copied only to node 0: ca.crt, node.key, node.pub

Nodes trust the server because the authority signed its certificate. The server identifies a node by its public key,
which is registered there; so nodes can be added without ``ca.key``. All files are readable only by their owner.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcover._files import write_error
from fedcover.deploy.processes.certificates import (
    certificate_pem,
    create_authority,
    create_node_key,
    create_server_certificate,
    private_pem,
    require_cryptography,
)
from fedcover.errors import InputError, check_whole

HOSTS = ("localhost", "127.0.0.1", "::1")
DAYS = 365
MAX_DAYS = 3650
EXPIRY_WARNING_DAYS = 14
"""Days before a certificate expires from which on a warning is shown."""
HOST_NAME = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True)
class ServerKeys:
    """A server's files: the authority's certificate, its own with its key, and its nodes' public keys."""

    ca: Path
    certificate: Path
    key: Path
    nodes: tuple[Path, ...] = ()


@dataclass(frozen=True)
class NodeKeys:
    """A node's files: the authority's certificate, its private key and its public key."""

    ca: Path
    key: Path
    public: Path


def make_keys(folder: str | Path, nodes: int, hosts: Sequence[str] = HOSTS, days: int = DAYS) -> list[Path]:
    """Create a new authority, a server certificate and node keys; return the folders to copy, the server's first.

    Args:
        folder: The folder for the keys; it must not have an authority yet.
        nodes: The number of nodes.
        hosts: The names and IP addresses under which nodes reach the server.
        days: For how many days the certificates are valid.
    """
    check_whole("nodes", nodes, 1)
    check_whole("days", days, 1)
    if days > MAX_DAYS:
        raise InputError(f"days must be at most {MAX_DAYS}; got {days}")
    names = list(dict.fromkeys(_host_name(host) for host in hosts))
    if not names:
        raise InputError(
            "hosts must have at least one item; give the name or address under which nodes reach the server"
        )
    home = Path(folder)
    if (home / "ca.key").exists() or (home / "ca.crt").exists():
        raise InputError(
            f"{home} already has an authority, which is never overwritten; add nodes to it with --add,"
            " or name another folder for another federation"
        )
    require_cryptography()
    server = home / "server"
    for path in (home, server, server / "nodes"):
        _create_folder(path)
    key, certificate = create_authority(days)
    _write_new(home / "ca.key", private_pem(key))
    _write_new(home / "ca.crt", certificate_pem(certificate))
    server_key, server_certificate = create_server_certificate(names, days, key, certificate)
    _write_new(server / "ca.crt", certificate_pem(certificate))
    _write_new(server / "server.key", private_pem(server_key))
    _write_new(server / "server.crt", certificate_pem(server_certificate))
    return [server, *(_add_node(home, number) for number in range(nodes))]


def add_nodes(folder: str | Path, nodes: int) -> list[Path]:
    """Create keys for further nodes of the federation in ``folder`` and return their folders; nothing else changes."""
    check_whole("nodes", nodes, 1)
    home = Path(folder)
    if not (home / "ca.crt").is_file() or not (home / "server").is_dir():
        raise InputError(f"{home} has no keys of a federation to add to; leave out --add to create them")
    require_cryptography()
    check_certificate(home / "ca.crt")
    numbers = [int(name[5:]) for path in home.iterdir() if re.fullmatch(r"node-\d+", name := path.name, re.ASCII)]
    first = max(numbers, default=-1) + 1
    return [_add_node(home, number) for number in range(first, first + nodes)]


def rotate_node(folder: str | Path, name: str) -> Path:
    """Replace the key of a node by a new one and return the node's folder; the old key is revoked.

    Args:
        folder: The folder of the keys.
        name: The node, such as node-3.
    """
    home, node = _node_folder(folder, name)
    require_cryptography()
    private, public = create_node_key()
    _replace(node / "node.key", private)
    _replace(node / "node.pub", public)
    _replace(home / "server" / "nodes" / f"{name}.pub", public)
    return node


def revoke_node(folder: str | Path, name: str) -> Path:
    """Remove the public key of a node from the server's folder and return its path; the node's own folder stays.

    Args:
        folder: The folder of the keys, or the server's copy of its part.
        name: The node, such as node-3.
    """
    home = Path(folder)
    paths = [path / f"{name}.pub" for path in (home / "server" / "nodes", home / "nodes")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise InputError(f"there is no key {paths[0]}; the nodes are {_node_names(home)}")
    path.unlink()
    return path


def _node_folder(folder: str | Path, name: str) -> tuple[Path, Path]:
    home = Path(folder)
    node = home / name
    if not re.fullmatch(r"node-\d+", name, re.ASCII) or not node.is_dir():
        raise InputError(f"{home} has no node '{name}'; the nodes are {_node_names(home)}")
    return home, node


def _node_names(home: Path) -> str:
    nodes = home / "server" / "nodes"
    names = [path.stem for path in public_keys(nodes if nodes.is_dir() else home / "nodes")]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"


def server_keys(folder: str | Path) -> ServerKeys:
    """Return the server's keys in a folder; raise InputError if one is missing or a certificate has expired."""
    home = Path(folder)
    ca, certificate, key = _existing_files(home, ("ca.crt", "server.crt", "server.key"), "server")
    for path in (ca, certificate):
        check_certificate(path)
    return ServerKeys(ca, certificate, key, tuple(public_keys(home / "nodes")))


def node_keys(folder: str | Path) -> NodeKeys:
    """Return a node's keys in a folder; raise InputError if one is missing or the authority's certificate expired."""
    keys = NodeKeys(*_existing_files(Path(folder), ("ca.crt", "node.key", "node.pub"), "node-0"))
    check_certificate(keys.ca)
    return keys


def public_keys(folder: str | Path) -> list[Path]:
    """Return the public keys ``*.pub`` in a folder, that of node-2 before that of node-10."""
    return sorted(Path(folder).glob("*.pub"), key=lambda path: (len(path.name), path.name))


def check_certificate(path: Path, now: datetime.datetime | None = None) -> int:
    """Return for how many more days a certificate is valid; raise InputError if it is not valid now."""
    require_cryptography()
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is not a readable certificate ({error}); copy it again from the folder of the keys"
        ) from None
    now = now or datetime.datetime.now(datetime.UTC)
    if now < certificate.not_valid_before_utc:
        raise InputError(
            f"{path} is not valid before {certificate.not_valid_before_utc:%Y-%m-%d}; set this machine's clock"
        )
    if now >= certificate.not_valid_after_utc:
        raise InputError(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; create new keys in a new folder with"
            " `fedcover deploy keys` and copy them to all machines"
        )
    return (certificate.not_valid_after_utc - now).days


def _existing_files(home: Path, names: Sequence[str], example: str) -> list[Path]:
    paths = [(home / name).absolute() for name in names]
    for path in paths:
        if not path.is_file():
            inner = home / example / path.name
            hint = f"name {home / example}" if inner.is_file() else f"name the `{example}` folder of the keys"
            raise InputError(f"{home} has no {path.name}; {hint}, or create keys with `fedcover deploy keys`")
    return paths


def _host_name(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not HOST_NAME.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
            raise InputError(f"'{host}' is not a host; give a name or an IP address without a port") from None
        return host


def _create_folder(path: Path) -> None:
    """Create a folder that only its owner can read; an existing one keeps its permissions."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise write_error(path, error) from error


def _write_new(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; an existing one is never overwritten."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise InputError(f"{path} already exists, and keys are never overwritten; name another folder") from None
    except OSError as error:
        raise write_error(path, error) from error


def _replace(path: Path, content: bytes) -> None:
    """Replace a file in one step by one that only its owner can read."""
    draft = path.with_name(f".{path.name}.part")
    draft.unlink(missing_ok=True)
    _write_new(draft, content)
    os.replace(draft, path)


def _add_node(home: Path, number: int) -> Path:
    node, nodes = home / f"node-{number}", home / "server" / "nodes"
    for folder in (node, nodes):
        _create_folder(folder)
    private, public = create_node_key()
    _write_new(node / "node.key", private)
    _write_new(node / "node.pub", public)
    _write_new(node / "ca.crt", (home / "ca.crt").read_bytes())
    _write_new(nodes / f"node-{number}.pub", public)
    return node
