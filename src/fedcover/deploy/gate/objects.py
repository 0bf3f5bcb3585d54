"""A check of the objects that nodes send: Flower builds an array from its chunks before anything can look at it.

An array names its chunks by number, and may name one many times: 20 MiB on the wire would then become any amount of
memory on the server.
"""

import json

from flwr.proto.message_pb2 import PushObjectRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

MAX_REPEATS = 8
"""How many more chunks an array may name than it sends; equal chunks, such as zeros, are sent once."""
ARRAY = b"Array "
MAX_ARRAY_BYTES = 1 << 20
"""The size limit of the object that names an array's chunks."""


def object_problem(body: bytes) -> str:
    """Return why the object in a request to push one is refused; empty if it is not.

    >>> chunks = b'Array %s 80' + bytes(1) + b'{"dtype": "uint8", "shape": [9], "stype": "", "arraychunk_ids": %s}'
    >>> object_problem(PushObjectRequest(object_content=chunks % (b"a,b", b"[0, 1, 0]")).SerializeToString())
    ''
    >>> object_problem(PushObjectRequest(object_content=chunks % (b"a", str([0] * 99).encode())).SerializeToString())
    'an array repeats its chunks 98 times'
    """
    try:
        content = PushObjectRequest.FromString(body).object_content
    except DecodeError:
        return "the request cannot be read"
    if not content.startswith(ARRAY):
        return ""
    if len(content) > MAX_ARRAY_BYTES:
        return "an array names too many chunks"
    head, _, text = content.partition(b"\x00")
    try:
        named = json.loads(text)["arraychunk_ids"]
        sent = head.split(b" ")[1].split(b",")
    except (ValueError, LookupError, TypeError):
        return "an array cannot be read"
    if not isinstance(named, list):
        return "an array cannot be read"
    repeats = len(named) - len(sent)
    return f"an array repeats its chunks {repeats} times" if repeats > MAX_REPEATS else ""
