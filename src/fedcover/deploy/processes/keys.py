"""Keys of a federation: an authority, the server's certificate, and one key for each node.

    FOLDER/ca.key             signs the server's certificate; stays here, neither the server nor a node needs it
    FOLDER/ca.crt             what everyone trusts; no secret
    FOLDER/server/            copied to the server: ca.crt, server.crt, server.key, nodes/node-0.pub ...
    FOLDER/node-0/            copied to node 0 alone: ca.crt, node.key, node.pub

Nodes trust the server since the authority signed its certificate. The server knows a node by its public key, which is
registered with it; so nodes can be added without ``ca.key``. All files can be read by their owner alone.
"""

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedcover.errors import InputError, check_extra, check_whole

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

HOSTS = ("localhost", "127.0.0.1", "::1")
DAYS = 365
MOST_DAYS = 3650
SOON = 14
"""Days before the end of a certificate from which on its end is told."""
HOST_NAME = re.compile(r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True)
class ServerKeys:
    """What a server needs: the authority's certificate, its own with its key, and its nodes' public keys."""

    ca: Path
    certificate: Path
    key: Path
    nodes: tuple[Path, ...] = ()


@dataclass(frozen=True)
class NodeKeys:
    """What a node needs: the authority's certificate, its private key and its public key."""

    ca: Path
    key: Path
    public: Path


def make_keys(folder: str | Path, nodes: int, hosts: Sequence[str] = HOSTS, days: int = DAYS) -> list[Path]:
    """The folders to hand out, the server's first: a new authority, a certificate for ``hosts`` and ``nodes`` keys."""
    check_whole("nodes", nodes, 1)
    _check_days(days)
    names = list(dict.fromkeys(_name(host) for host in hosts))
    if not names:
        raise InputError("a server's certificate needs a host; give the name or address that nodes reach it by")
    home = Path(folder)
    if (home / "ca.key").exists() or (home / "ca.crt").exists():
        raise InputError(
            f"{home} already has an authority, which is never overwritten; add nodes to it with --add,"
            " or name another folder for a federation of its own"
        )
    _need_cryptography()
    _make_folder(home)
    key, certificate = _authority(days)
    _write(home / "ca.key", _private(key))
    _write(home / "ca.crt", _pem(certificate))
    server = home / "server"
    for part in (server, server / "nodes"):
        _make_folder(part)
    server_key, server_certificate = _server(names, days, key, certificate)
    _write(server / "ca.crt", _pem(certificate))
    _write(server / "server.key", _private(server_key))
    _write(server / "server.crt", _pem(server_certificate))
    return [server, *(_add_node(home, number) for number in range(nodes))]


def add_nodes(folder: str | Path, nodes: int) -> list[Path]:
    """The folders of ``nodes`` more nodes of the federation whose keys are in ``folder``; nothing else changes."""
    check_whole("nodes", nodes, 1)
    home = Path(folder)
    if not (home / "ca.crt").is_file() or not (home / "server").is_dir():
        raise InputError(f"{home} has no keys of a federation to add to; leave out --add to make them")
    _need_cryptography()
    check_certificate(home / "ca.crt")
    there = [int(name[5:]) for path in home.iterdir() if (name := path.name).startswith("node-") and name[5:].isdigit()]
    first = max(there, default=-1) + 1
    return [_add_node(home, number) for number in range(first, first + nodes)]


def server_keys(folder: str | Path) -> ServerKeys:
    """The server's keys in a folder, all there and the certificate not expired."""
    home = Path(folder)
    ca, certificate, key = _all_there(home, ("ca.crt", "server.crt", "server.key"), "server")
    for path in (ca, certificate):
        check_certificate(path)
    return ServerKeys(ca, certificate, key, tuple(public_keys(home / "nodes")))


def node_keys(folder: str | Path) -> NodeKeys:
    """A node's keys in a folder, all there and the authority's certificate not expired."""
    found = NodeKeys(*_all_there(Path(folder), ("ca.crt", "node.key", "node.pub"), "node-0"))
    check_certificate(found.ca)
    return found


def authority(folder: str | Path) -> Path:
    """The authority's certificate in a server's or a node's folder, not expired."""
    (ca,) = _all_there(Path(folder), ("ca.crt",), "server")
    check_certificate(ca)
    return ca


def public_keys(folder: str | Path) -> list[Path]:
    """The public keys ``*.pub`` in a folder, those of node-2 before those of node-10."""
    return sorted(Path(folder).glob("*.pub"), key=lambda path: (len(path.name), path.name))


def check_certificate(path: Path, now: datetime.datetime | None = None) -> int:
    """How many days a certificate still holds, or an error if it does not hold now."""
    _need_cryptography()
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} is no readable certificate ({error}); copy it anew from where keys were made"
        ) from None
    now = now or datetime.datetime.now(datetime.UTC)
    if now < certificate.not_valid_before_utc:
        raise InputError(f"{path} holds only from {certificate.not_valid_before_utc:%Y-%m-%d} on; set this clock right")
    if now >= certificate.not_valid_after_utc:
        raise InputError(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; make new keys in a new folder with"
            " `fedcover deploy keys` and hand them out"
        )
    return (certificate.not_valid_after_utc - now).days


def _all_there(home: Path, names: Sequence[str], example: str) -> list[Path]:
    paths = [(home / name).absolute() for name in names]
    for path in paths:
        if not path.is_file():
            inner = home / example / path.name
            hint = f"name {home / example}" if inner.is_file() else f"name the `{example}` folder that was made for it"
            raise InputError(f"{home} has no {path.name}; {hint}, or make keys with `fedcover deploy keys`")
    return paths


def _check_days(days: int) -> None:
    check_whole("days", days, 1)
    if days > MOST_DAYS:
        raise InputError(f"days must be at most {MOST_DAYS}; got {days}")


def _name(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not HOST_NAME.fullmatch(host) or re.fullmatch(r"[\d.]+", host):
            raise InputError(f"'{host}' is no host; give a name or an IP address without a port") from None
        return host


def _need_cryptography() -> None:
    check_extra("flower", "a deployment with keys", "cryptography")


def _make_folder(path: Path) -> None:
    """A folder for its owner's eyes; one that is there keeps the rights it has."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise InputError(f"{path} cannot be made ({error.strerror}); name a folder in one you own") from error


def _write(path: Path, content: bytes) -> None:
    """A new file for its owner's eyes; one that is there is left alone, whatever happens."""
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
    except FileExistsError:
        raise InputError(f"{path} is there already, and keys are never overwritten; name another folder") from None
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}); name a folder that you own") from error


def _add_node(home: Path, number: int) -> Path:
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric import ec

    node, nodes = home / f"node-{number}", home / "server" / "nodes"
    for folder in (node, nodes):
        _make_folder(folder)
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH) + b"\n"
    _write(node / "node.key", key.private_bytes(to.Encoding.PEM, to.PrivateFormat.OpenSSH, to.NoEncryption()))
    _write(node / "node.pub", public)
    _write(node / "ca.crt", (home / "ca.crt").read_bytes())
    _write(nodes / f"node-{number}.pub", public)
    return node


def _private(key: "EllipticCurvePrivateKey") -> bytes:
    from cryptography.hazmat.primitives import serialization as to

    return key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())


def _pem(certificate: "x509.Certificate") -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _draft(name: str, issuer: str, key: "EllipticCurvePrivateKey", days: int, is_ca: bool) -> "x509.CertificateBuilder":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    called = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])]) for text in (name, issuer)]
    return (
        x509.CertificateBuilder()
        .subject_name(called[0])
        .issuer_name(called[1])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
    )


AUTHORITY = "fedcover authority"


def _authority(days: int) -> "tuple[EllipticCurvePrivateKey, x509.Certificate]":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    signs = {"key_cert_sign": True, "crl_sign": True}
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    draft = (
        _draft(AUTHORITY, AUTHORITY, key, days, is_ca=True)
        .add_extension(x509.KeyUsage(**usage, **signs), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, draft.sign(key, hashes.SHA384())


def _server(
    names: Sequence[str], days: int, ca_key: "EllipticCurvePrivateKey", ca: "x509.Certificate"
) -> "tuple[EllipticCurvePrivateKey, x509.Certificate]":
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    def known_as(name: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(name))
        except ValueError:
            return x509.DNSName(name)

    key = ec.generate_private_key(ec.SECP384R1())
    signer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    draft = (
        _draft(names[0], AUTHORITY, key, days, is_ca=False)
        .add_extension(x509.SubjectAlternativeName([known_as(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
    )
    return key, draft.sign(ca_key, hashes.SHA384())
