"""A check of what nodes send, before Flower acts on it.

A registered node may be malicious. Flower lets a node send any message, also one that looks like an order of the server
to another node, and it builds arrays from their chunks before anything can look at them: an array that names one chunk
again and again would become any amount of memory.
"""

import json

from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

MAX_REPEATS = 8
"""How many more chunks an array may name than it sends; equal chunks, such as zeros, are sent once."""
MAX_OBJECTS = 512
"""How many objects a message may have; a reply of 10 GB has as many, of 20 MiB each."""
MAX_CHILDREN = 32
"""How many others an object may have that is not an array."""
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
    head, _, text = content[:MAX_ARRAY_BYTES].partition(b"\x00")
    words = head.split(b" ")
    sent = words[1].split(b",") if len(words) == 3 and words[1] else []
    if not content.startswith(ARRAY):
        return "an object has too many parts" if len(sent) > MAX_CHILDREN else ""
    if len(content) > MAX_ARRAY_BYTES:
        return "an array names too many chunks"
    try:
        named = json.loads(text)["arraychunk_ids"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return "an array cannot be read"
    if not isinstance(named, list):
        return "an array cannot be read"
    repeats = len(named) - len(set(sent))
    return f"an array repeats its chunks {repeats} times" if repeats > MAX_REPEATS or len(set(sent)) < len(sent) else ""


def message_problem(body: bytes) -> str:
    """Return why a request to push messages is refused; empty if it is one reply of this node to the server.

    >>> message_problem(PushMessagesRequest().SerializeToString())
    'a node sends one reply at a time'
    """
    try:
        request = PushMessagesRequest.FromString(body)
    except DecodeError:
        return "the request cannot be read"
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "a node sends one reply at a time"
    metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
    if metadata.src_node_id != request.node.node_id or metadata.src_node_id == SUPERLINK_NODE_ID:
        return "a message is sent in the name of another"
    if metadata.dst_node_id != SUPERLINK_NODE_ID or not metadata.reply_to_message_id:
        return "a message is not a reply to the server"
    if tree.object_id != metadata.message_id or _size(tree) > MAX_OBJECTS:
        return "the objects of a message are not valid"
    return ""


def _size(tree: ObjectTree) -> int:
    """Return the number of objects of a tree, or more than allowed as soon as there are more."""
    count, waiting = 0, [tree]
    while waiting and count <= MAX_OBJECTS:
        count += 1
        waiting += waiting.pop().children
    return count
