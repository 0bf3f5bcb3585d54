"""A stranger at the gate: what nodes do not need is refused, before anything of it is read."""

import datetime
import fcntl
import http.client
import json
import socket
import ssl
import struct
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.superlink.main import create_app

from fedcover.deploy.gate import listener, protocol
from fedcover.deploy.gate.contents import object_problem
from fedcover.deploy.gate.gate import MAX_BYTES
from fedcover.deploy.node.fleet import read_key
from fedcover.deploy.processes import server as server_module
from fedcover.deploy.processes.keys import make_keys, revoke_node, server_keys
from fedcover.deploy.processes.server import Server
from tests.endtoend.deploy.conftest import Marked
from tests.endtoend.deploy.fleet import Program, descendants_of, wait_for


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, marked: Marked) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gate")
    make_keys(folder / "keys", 3)
    make_keys(folder / "stranger", 1)
    with closing(Server(server_keys(folder / "keys" / "server"), folder / "state", "0.0.0.0")) as server:
        yield server


def keys_of(server: Server) -> Path:
    return server.folder.parent / "keys"


def signed(key: Path, age: float = 0.0) -> dict[str, str]:
    """Return the headers by which a node proves who it is."""
    private = read_key(key)
    timestamp = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(private.public_key())).decode(),
        TIMESTAMP_HEADER: timestamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(private, timestamp.encode())).decode(),
    }


def request(
    server: Server, path: str, headers: dict[str, str] | None = None, body: bytes = b"", host: str = "127.0.0.1",
    method: str = "POST",
) -> tuple[int, str]:  # fmt: skip
    """Send a request and return the status and the text of the answer."""
    trust = ssl.create_default_context(cafile=keys_of(server) / "ca.crt")
    trust.check_hostname = False
    with closing(http.client.HTTPSConnection(host, server.port, timeout=10, context=trust)) as connection:
        connection.request(method, path, body, {"content-type": PROTOBUF_MEDIA_TYPE, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")


def other_address() -> str:
    """Return an address of this machine that is not loopback."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:
                continue
            if (address := socket.inet_ntoa(reply[20:24])) and not address.startswith("127."):
                return address
    return pytest.skip("this machine has no address but loopback")


def test_every_method_that_is_not_a_nodes_is_refused(server: Server) -> None:
    """Of all paths that a SuperLink serves, also for a node with a valid key, and from another address."""
    paths = sorted(create_app().openapi()["paths"])
    own = signed(keys_of(server) / "node-0" / "node.key")
    allowed = {f"/v1/fleet/{method}" for method in MAX_BYTES} | {"/health"}
    refused = [path for path in paths if path not in allowed]
    assert len(refused) > 30
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/register-node"} <= set(refused)
    for path in refused:
        for headers in ({}, own):
            status, text = request(server, path, headers, host=other_address())
            assert (status, "does not forward" in text) == (404, True), f"{path}: {status} {text}"
    for odd in (
        "/v1/fleet/../control/start-run",
        "//v1/control/start-run",
        "/v1/fleet/%2e%2e/control/list-runs",
        "/docs",
    ):
        assert request(server, f"/v1/{odd}", own)[0] == 404
    assert request(server, "/v1/fleet/pull-messages", own, method="GET")[0] == 404


def test_only_registered_nodes_pass(server: Server) -> None:
    keys = keys_of(server)
    path = "/v1/fleet/pull-messages"
    assert request(server, path)[0] == 401
    status, text = request(server, path, signed(server.folder.parent / "stranger" / "node-0" / "node.key"))
    assert (status, "not registered" in text) == (403, True)
    assert request(server, path, signed(keys / "node-0" / "node.key"))[0] == 401  # the SuperLink: no such node yet
    status, text = request(server, path, signed(keys / "node-0" / "node.key", age=400))
    assert (status, "clocks differ by 400 s" in text) == (401, True)
    status, text = request(server, path, signed(keys / "node-0" / "node.key", age=-20))
    assert (status, "clocks differ by 20 s" in text) == (401, True)
    forged = signed(keys / "node-0" / "node.key") | {FLEET_HTTP_SIGNATURE_HEADER: b64encode(b"x" * 96).decode()}
    assert request(server, path, forged)[0] == 401
    assert request(server, path, forged | {FLEET_HTTP_PUBLIC_KEY_HEADER: "%%%"})[0] == 401
    node = signed(keys / "node-2" / "node.key")
    revoke_node(keys, "node-2")
    server.update_nodes()
    assert request(server, path, node)[0] == 403
    assert server.gate.refusals["the request has no valid signature"] >= 1


def test_large_requests_are_refused_before_they_are_read(server: Server) -> None:
    own = signed(keys_of(server) / "node-0" / "node.key")
    for method, size in (("push-object", 10**12), ("pull-messages", MAX_BYTES["pull-messages"] + 1)):
        assert request(server, f"/v1/fleet/{method}", own | {"content-length": str(size)})[0] == 413
    chunked = own | {"transfer-encoding": "chunked"}
    size = MAX_BYTES["pull-messages"] + 1
    body = b"%x\r\n" % size + bytes(size) + b"\r\n"  # and more may follow
    with closing(raw(server)) as connection:
        head = "".join(f"{name}: {value}\r\n" for name, value in chunked.items())
        connection.sendall(f"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
        connection.sendall(body)
        assert b" 413 " in connection.recv(1000)
    with closing(raw(server)) as connection, suppress(OSError):  # the gate closes the connection while it is sent
        connection.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nlong: " + b"a" * (1 << 20))
        assert b" 400 " in connection.recv(1000)


def test_an_array_that_would_grow_on_the_server_is_refused(server: Server) -> None:
    """Flower would join one chunk a million times, before fedcover sees the array."""
    array = Array(np.zeros(50_000_000, np.uint8))  # equal chunks are sent once
    honest = array.deflate()
    assert object_problem(PushObjectRequest(object_content=honest).SerializeToString()) == ""
    head, _, text = honest.partition(bytes(1))
    fields = json.loads(text) | {"arraychunk_ids": [0] * 3_000}
    hostile = head + bytes(1) + json.dumps(fields).encode()
    kind, chunk, size = head.split(b" ")
    repeated = b" ".join([kind, b",".join([chunk] * 3_000), size]) + bytes(1) + json.dumps(fields).encode()
    assert "repeats" in object_problem(PushObjectRequest(object_content=repeated).SerializeToString())
    own = signed(keys_of(server) / "node-0" / "node.key")
    body = PushObjectRequest(object_content=hostile).SerializeToString()
    status, text = request(server, "/v1/fleet/push-object", own, body)
    assert (status, "repeats its chunks" in text) == (400, True)
    for broken in (b"", b"\xff" * 40, PushObjectRequest(object_content=b"Array x").SerializeToString()):
        assert request(server, "/v1/fleet/push-object", own, broken)[0] in (400, 401)


def test_a_node_sends_only_its_own_replies_to_the_server(server: Server) -> None:
    """Flower would store a message in the server's name, and pass it to another node as an order."""
    own = signed(keys_of(server) / "node-0" / "node.key")

    def push(**changes: Any) -> tuple[int, str]:
        fields = {"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "asked", "message_id": "a"} | changes
        message = MessageProto(metadata=Metadata(**fields))
        request_ = PushMessagesRequest(
            node=Node(node_id=7), messages_list=[message], message_object_trees=[ObjectTree(object_id="a")]
        )
        return request(server, "/v1/fleet/push-messages", own, request_.SerializeToString())

    assert push()[0] == 401  # it passes the gate; the SuperLink has no node 7 with this key
    for changes, reason in (
        ({"src_node_id": 1}, "in the name of another"),
        ({"src_node_id": 8}, "in the name of another"),
        ({"dst_node_id": 8}, "not a reply to the server"),
        ({"reply_to_message_id": ""}, "not a reply to the server"),
        ({"message_id": "b"}, "objects of a message"),
    ):
        status, text = push(**changes)
        assert (status, reason in text) == (400, True), text


def test_a_header_that_occurs_twice_is_not_a_signature(server: Server) -> None:
    own = signed(keys_of(server) / "node-0" / "node.key")
    lines = [f"{name}: {value}" for name, value in own.items()]
    twice = "\r\n".join(["POST /v1/fleet/pull-messages HTTP/1.1", "Host: x", *lines, lines[0], "Content-Length: 0"])
    with closing(raw(server)) as connection:
        connection.sendall(f"{twice}\r\n\r\n".encode())
        assert b" 401 " in connection.recv(1000)


def test_idle_connections_are_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 1.0)
    monkeypatch.setattr(protocol, "LOOK", 0.2)
    with closing(raw(server)) as silent, closing(raw(server)) as slow:
        slow.sendall(b"POST /v1/fleet/pull-mess")
        assert silent.recv(10) == b""
        assert slow.recv(10) == b""


def test_one_peer_has_few_connections_before_they_say_anything(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would otherwise use up the file descriptors of the server, without a key and without a TLS handshake."""
    address, peers = ("127.0.0.1", server.port), server._gate.listener.peers
    wait_for(lambda: not peers, 30, "the end of other connections")
    monkeypatch.setattr(listener, "MAX_PER_PEER", 2)
    with closing(socket.create_connection(address, 10)), closing(socket.create_connection(address, 10)):
        wait_for(lambda: peers["127.0.0.1"] == 2, 10)
        with closing(socket.create_connection(address, 10)) as third:
            assert third.recv(10) == b""
    wait_for(lambda: not peers, 30, "the end of both connections")
    assert request(server, "/health", method="GET")[0] == 200


def settled_nodes(server: Server) -> set[str]:
    """Return the names of registered nodes, once those of which the keys were removed before are none of them."""
    present = {path.stem for path in (keys_of(server) / "server" / "nodes").glob("*.pub")}

    def settled() -> bool:
        server.update_nodes()
        return {node.name for node in server.control.nodes()} == present

    wait_for(settled, 30, "the end of other registrations")
    return present


def test_keys_that_cannot_be_read_for_a_moment_are_not_revoked(server: Server) -> None:
    nodes = keys_of(server) / "server" / "nodes"
    own = signed(keys_of(server) / "node-0" / "node.key")
    before = settled_nodes(server)
    nodes.rename(nodes.with_name("away"))
    server.update_nodes()
    assert request(server, "/v1/fleet/pull-messages", own)[0] == 401  # it passes the gate
    nodes.with_name("away").rename(nodes)
    key = nodes / "node-0.pub"
    content = key.read_bytes()
    key.write_bytes(content[:20])  # as if it is being copied
    server.update_nodes()
    assert request(server, "/v1/fleet/pull-messages", own)[0] == 401
    key.unlink()
    server.update_nodes()
    assert request(server, "/v1/fleet/pull-messages", own)[0] == 403  # refused at once
    assert {node.name for node in server.control.nodes()} == before  # and not yet unregistered
    key.write_bytes(content)
    server.update_nodes()
    assert request(server, "/v1/fleet/pull-messages", own)[0] == 401


def test_keys_are_not_unregistered_while_others_are_copied(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower never registers them again: a slow copy of the folder would need new keys for the whole fleet."""
    monkeypatch.setattr(server_module, "UNREGISTER_AFTER", 4.0)
    nodes = keys_of(server) / "server" / "nodes"
    settled_nodes(server)
    keys = {nodes / f"{name}.pub": (nodes / f"{name}.pub").read_bytes() for name in ("node-0", "node-1")}
    before = {node.id for node in server.control.nodes()}
    for path in keys:
        path.unlink()
    server.update_nodes()
    for path, content in keys.items():
        time.sleep(2.5)
        server.update_nodes()
        path.write_bytes(content)
        server.update_nodes()
    assert {node.id for node in server.control.nodes()} == before


def raw(server: Server) -> ssl.SSLSocket:
    trust = ssl.create_default_context(cafile=keys_of(server) / "ca.crt")
    trust.check_hostname = False
    return trust.wrap_socket(socket.create_connection(("127.0.0.1", server.port), 10))


def test_plain_text_is_refused(server: Server) -> None:
    with closing(socket.create_connection(("127.0.0.1", server.port), 10)) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in connection.recv(1000)


def test_the_superlink_is_on_loopback_only_and_a_node_opens_no_port(server: Server, tmp_path: Path) -> None:
    with pytest.raises(OSError):  # refused or unreachable
        socket.create_connection((other_address(), server.link.port), 2)
    node = Program(
        tmp_path / "node.out", "deploy", "client", "--server", f"127.0.0.1:{server.port}", "--client", "0", "--keys",
        str(keys_of(server) / "node-1"),
    )  # fmt: skip
    try:
        node.wait_for("joined")
        assert listeners(descendants_of(node.process.pid)) == set()
        assert listeners(descendants_of(server.link.program.pid)) == {("127.0.0.1", server.link.port)}
    finally:
        node.end()


def listeners(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {_address(row[1]) for row in rows if row[3] == "0A" and row[9] in inodes}


def _address(text: str) -> tuple[str, int]:
    host, port = text.split(":")
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(host)[:4])), int(port, 16)
