"""Checks of certificates and keys: who signed them, for which hosts they are, and whether they belong together."""

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from fedcover.deploy.address import LOOPBACK_HOST
from fedcover.deploy.doctor.findings import Finding
from fedcover.deploy.gate.allowed_keys import AllowedKeys, read_public_key
from fedcover.deploy.node.fleet import read_key
from fedcover.deploy.node.signature import public_bytes
from fedcover.deploy.processes.keys import EXPIRY_WARNING_DAYS, NodeKeys, ServerKeys, check_certificate
from fedcover.errors import InputError

EVERYWHERE = ("0.0.0.0", "::")
"""Addresses that mean all networks of a machine."""


def expiry_finding(certificate: Path) -> Finding:
    """Return for how long a certificate is valid; raise InputError if it is not valid now."""
    days = check_certificate(certificate)
    text = f"{certificate.name} is valid for {days} more days"
    if days < EXPIRY_WARNING_DAYS:
        return Finding("warning", "certificate", f"{text}; create new keys before that, and copy them to all machines")
    return Finding("ok", "certificate", text)


def check_chain(keys: ServerKeys) -> str:
    """Return a sentence; raise InputError unless the authority signed the certificate and the key belongs to it."""
    ca, certificate = (x509.load_pem_x509_certificate(path.read_bytes()) for path in (keys.ca, keys.certificate))
    remedy = "copy the folder `server` again from the machine that created the keys"
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise InputError(f"{keys.certificate} was not signed by the authority in {keys.ca}; {remedy}") from None
    try:
        key = load_pem_private_key(keys.key.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{keys.key} is not a readable key ({error}); {remedy}") from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise InputError(f"{keys.key} is not the key of {keys.certificate}; {remedy}")
    return "the authority signed server.crt, and server.key belongs to it"


def check_hosts(certificate: Path, host: str) -> str:
    """Return the hosts of a server's certificate; raise InputError unless it is for the addresses that are used."""
    loaded = x509.load_pem_x509_certificate(certificate.read_bytes())
    try:
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise InputError(f"{certificate} names no host; create keys with `fedcover deploy keys --host NAME`") from None
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    needed = {LOOPBACK_HOST: "by which this machine reaches its SuperLink"}
    if host not in EVERYWHERE:
        needed.setdefault(host, "on which the server shall listen")
    for name, reason in needed.items():
        if name not in hosts:
            raise InputError(
                f"{certificate} is for {', '.join(hosts)} and not for {name}, {reason}; create keys with --host {name}"
            )
    return f"server.crt is for {', '.join(hosts)}; nodes must use one of these names"


def check_node_files(folder: Path) -> str:
    """Return the number of public keys in a folder; raise InputError if there is none, or one is not readable."""
    allowed = AllowedKeys(folder)
    for reason in allowed.problems.values():
        raise InputError(reason)
    if not (count := len(allowed.names())):
        raise InputError(f"{folder} has no *.pub, so no node can join; add nodes with `fedcover deploy keys --add`")
    return f"{count} nodes may join" if count != 1 else "1 node may join"


def check_node_pair(keys: NodeKeys) -> str:
    """Return a sentence; raise InputError unless a node's public key is that of its private key."""
    if read_public_key(keys.public) != public_bytes(read_key(keys.key)):
        raise InputError(f"{keys.public} is not the public key of {keys.key}; copy the folder of this node again")
    return "node.pub belongs to node.key"
