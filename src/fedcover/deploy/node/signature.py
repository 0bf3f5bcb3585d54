"""The headers by which a node proves that it has its key."""

import datetime
from base64 import b64encode

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message


def public_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Return the public key of a private one, in the form in which nodes send it."""
    return public_key_to_bytes(key.public_key())


def signed_headers(key: ec.EllipticCurvePrivateKey, now: datetime.datetime) -> dict[str, str]:
    """Return the headers of a request that is signed with a key at a time."""
    timestamp = now.isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_bytes(key)).decode("ascii"),
        TIMESTAMP_HEADER: timestamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, timestamp.encode())).decode("ascii"),
    }
