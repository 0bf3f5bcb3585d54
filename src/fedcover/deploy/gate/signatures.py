"""Who sends a request to the gate: the key that signed it, if that key may pass."""

import binascii
import datetime
from base64 import b64decode

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from starlette.requests import Request

from fedcover.deploy.gate.allowed_keys import AllowedKeys
from fedcover.deploy.gate.refusals import NOT_SIGNED, UNKNOWN_KEY, Refusal

HEADERS = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)


def authenticate(request: Request, keys: AllowedKeys) -> tuple[bytes, Refusal | None]:
    """Return the key that signed a request, and None; or no key, and why the request is refused.

    An unknown key is refused before its signature is verified, which takes a millisecond.
    """
    values = [request.headers.getlist(name) for name in HEADERS]
    if any(len(value) != 1 for value in values):
        return b"", NOT_SIGNED
    (public,), (signature,), (timestamp,) = values
    try:
        key = b64decode(public, validate=True)
        if key not in keys:
            return b"", UNKNOWN_KEY
        if not verify_signature(
            bytes_to_public_key(key), timestamp.encode("ascii"), b64decode(signature, validate=True)
        ):
            return b"", NOT_SIGNED
        age = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(timestamp)).total_seconds()
    except (ValueError, TypeError, OverflowError, binascii.Error):
        return b"", NOT_SIGNED
    if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
        return b"", Refusal(401, "the clocks differ", f"the clocks differ by {abs(age):.0f} s; set the node's clock")
    return key, None
