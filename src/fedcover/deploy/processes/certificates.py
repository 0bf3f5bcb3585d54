"""The certificates and keys of a federation, created with ``cryptography``, which Flower installs."""

import datetime
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcover.errors import check_extra

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AUTHORITY = "fedcover authority"


def require_cryptography() -> None:
    """Raise InputError unless ``cryptography`` is installed."""
    check_extra("flower", "a deployment with keys", "cryptography")


def create_authority(days: int) -> "tuple[EllipticCurvePrivateKey, x509.Certificate]":
    """Return the key and the certificate of a new authority, valid for so many days."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    signing = {"key_cert_sign": True, "crl_sign": True}
    others = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    builder = (
        _builder(AUTHORITY, AUTHORITY, key, days, is_ca=True)
        .add_extension(x509.KeyUsage(**others, **signing), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return key, builder.sign(key, hashes.SHA384())


def create_server_certificate(
    hosts: Sequence[str], days: int, ca_key: "EllipticCurvePrivateKey", ca: "x509.Certificate"
) -> "tuple[EllipticCurvePrivateKey, x509.Certificate]":
    """Return the key and the certificate of a server, signed by an authority.

    Args:
        hosts: The names and IP addresses of the server.
        days: For how many days the certificate is valid.
        ca_key: The authority's key.
        ca: The authority's certificate.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP384R1())
    signer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(hosts[0], AUTHORITY, key, days, is_ca=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
    )
    return key, builder.sign(ca_key, hashes.SHA384())


def create_node_key() -> tuple[bytes, bytes]:
    """Return a new private key and its public key, both in OpenSSH's format."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return private, public + b"\n"


def private_pem(key: "EllipticCurvePrivateKey") -> bytes:
    """Return a private key as PEM."""
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: "x509.Certificate") -> bytes:
    """Return a certificate as PEM."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _general_name(host: str) -> "x509.GeneralName":
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    name: str, issuer: str, key: "EllipticCurvePrivateKey", days: int, is_ca: bool
) -> "x509.CertificateBuilder":
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.datetime.now(datetime.UTC)
    subject_name, issuer_name = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])]) for text in (name, issuer)
    )
    return (
        x509.CertificateBuilder()
        .subject_name(subject_name)
        .issuer_name(issuer_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
    )
