"""A node's connection to a server by Flower's Fleet API, the part of a SuperLink that nodes use.

It uses the protocol of Flower's own SuperNode with Flower's own client classes. The differences: requests carry the
server's time, a lost node is noticed after 10 to 20 seconds instead of 60, and nothing waits longer than needed.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto, user_config_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectResponse
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    UnexpectedObjectContentError,
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectPushError,
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.primitives.asymmetric import generate_key_pairs
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedcover.deploy.gate.refusals import REVOKED_HEADER
from fedcover.deploy.node.clock import ServerClock
from fedcover.deploy.node.signature import public_bytes, signed_headers
from fedcover.deploy.text import one_line
from fedcover.errors import FedcoverError, InputError

HEARTBEAT = 10
"""Seconds after which the server expects the next heartbeat, the least that Flower allows; it misses two."""
BEATS_PER_INTERVAL = 3
FIRST_WAIT = 0.05
"""Seconds before an object that is not complete on the server is requested again; it doubles up to a second."""
PERSISTENCE = 60.0
"""Seconds for which the rest of a message is tried again after the connection was lost."""
UNAVAILABLE = (502, 503, 504)
NOT_ACTIVATED = 2004
"""Flower's code for a key that is not registered, or whose node is still online."""
KEY_REQUIRED = 2001
"""Flower's code for a server that lets nodes join only by a registered key."""


class ConnectionLostError(FedcoverError):
    """The server does not respond now; a later try may succeed."""


class RefusedRequestError(FedcoverError):
    """The server refuses one request, such as a reply to a run that has ended; another try is of no use."""


class NotActivatedError(FedcoverError):
    """The node's key is not registered yet, or its last process is still online; a later try may succeed."""


class KeyRefusedError(InputError):
    """The server does not accept the node's key."""


class SignedRequests:
    """An interceptor of Flower's client that signs each request with the node's key and the server's time."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, clock: ServerClock) -> None:
        self._key, self._clock = key, clock
        self.public = public_bytes(key)

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Sign a request, send it and note the server's time; once more if the time was refused."""
        response = self._send(context, call_next)
        if response.status_code == httpx.codes.UNAUTHORIZED:  # the clock may have changed since the last response
            response = self._send(context, call_next)
        return response

    def _send(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers.update(signed_headers(self._key, self._clock.now()))
        response = call_next(context)
        self._clock.observe(dict(response.headers))
        return response


class Fleet:
    """A node's connection to a server.

    Close it, or use it with ``contextlib.closing``.

    Args:
        address: The server's HOST:PORT.
        ca: The authority's certificate; None for plain text.
        key: The node's private key; None creates one, which the server registers only if it has no keys.
        clock: The server's clock, from a first response.
    """

    def __init__(self, address: str, ca: Path | None, key: Path | None, clock: ServerClock | None = None) -> None:
        self.address, self._registers = address, key is None
        self.clock = clock or ServerClock()
        self._signed = SignedRequests(read_key(key) if key else generate_key_pairs()[0], self.clock)
        certificates = ca.read_bytes() if ca else None
        self._client = FleetHttpClient.from_server_address(address, ca is None, certificates, [self._signed])
        self._node: NodeProto | None = None
        self._stop = threading.Event()
        self._heartbeats: threading.Thread | None = None

    @property
    def node(self) -> NodeProto:
        """The node, with its id at the server."""
        assert self._node is not None, "the node has not joined"
        return self._node

    def join(self) -> int:
        """Join the server and return the node's id there; start to send heartbeats.

        Raises:
            NotActivatedError: If the key is not registered (yet), or the node is online already.
            ConnectionLostError: If the server does not respond.
        """
        public = self._signed.public
        if self._registers and self._node is None:
            self._call(self._client.RegisterNode, RegisterNodeFleetRequest(public_key=public))
        reply = self._call(
            self._client.ActivateNode, ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT)
        )
        self._node = NodeProto(node_id=reply.node_id)
        if self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._beat, daemon=True)
            self._heartbeats.start()
        return self.node.node_id

    def pull(self) -> Message | None:
        """Return the next message for this node, with its content; None if there is none.

        Raises:
            RefusedRequestError: If its content cannot be had, as when its sender died before it was complete.
        """
        reply = self._call(self._client.PullMessages, PullMessagesRequest(node=self.node))
        if not reply.messages_list:
            return None
        metadata, tree = reply.messages_list[0].metadata, reply.message_object_trees[0]
        with _lost_messages("a message could not be received"):
            message = pull_and_inflate_object_from_tree(
                tree,
                make_pull_object_fn_protobuf(self._calls(self._client.PullObject), self.node, metadata.run_id),
                make_confirm_message_received_fn_protobuf(
                    self._calls(self._client.ConfirmMessageReceived), self.node, metadata.run_id
                ),
                return_type=Message,
                max_time=self._seconds_until(metadata.created_at + metadata.ttl),
                max_tries_per_object=None,
                initial_backoff=FIRST_WAIT,
                backoff_cap=1.0,
            )
        message.metadata.__dict__["_message_id"] = tree.object_id  # its content does not include its own id
        return message

    def seconds_left(self, message: Message) -> float:
        """Return the seconds for which the server accepts a reply to a message."""
        return self._seconds_until(message.metadata.created_at + message.metadata.ttl)

    def _seconds_until(self, moment: float) -> float:
        return max(0.0, moment - self.clock.seconds())

    def run_config(self, run: int) -> dict[str, Any]:
        """Return the configuration with which a run was started."""
        reply = self._call(self._client.GetRun, GetRunRequest(node=self.node, run_id=run))
        return {**user_config_from_proto(reply.run.override_config), "app": reply.run.fab_id}

    def push(self, reply: Message, request: Message, seconds: float) -> None:
        """Send the reply to a request, which took so many seconds to make.

        Raises:
            RefusedRequestError: If the server does not take it, as when it is too late.
        """
        now, metadata = self.clock.seconds(), reply.metadata.__dict__
        metadata["_created_at"] = now  # by the server's clock, on which the time limit of the request is
        metadata["_ttl"] = self.seconds_left(request)
        metadata["_message_id"] = reply.object_id
        with no_object_id_recompute(), _lost_messages("a reply could not be sent"):
            response = self._calls(self._client.PushMessages)(
                PushMessagesRequest(
                    node=self.node,
                    messages_list=[message_to_proto(remove_content_from_message(reply))],
                    message_object_trees=[get_object_tree(reply)],
                    clientapp_runtime_list=[seconds],
                ),
            )
            if not response.objects_to_push:
                raise RefusedRequestError("a reply was not taken by the server; it was too late, or not the first")
            push_objects(
                get_all_nested_objects(reply),
                make_push_object_fn_protobuf(
                    self._calls(self._client.PushObject), self.node, reply.metadata.run_id, response.session_id
                ),
                object_ids_to_push=set(response.objects_to_push),
            )

    def close(self) -> None:
        """Leave the server, if it responds, and close the connection."""
        self._stop.set()
        if self._node is not None:
            # If the server is gone or refuses this node, it notices by itself.
            with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):
                self._client.DeactivateNode(DeactivateNodeRequest(node_id=self.node.node_id))
        self._client.close()

    def _beat(self) -> None:
        """Send heartbeats until the connection is closed; errors are those of the next pull."""
        while not self._stop.wait(HEARTBEAT / BEATS_PER_INTERVAL):
            try:
                self._client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=self.node, heartbeat_interval=HEARTBEAT))
            except (httpx.HTTPError, RuntimeError, ValueError):
                continue

    def _calls(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that calls a method, again if the connection is lost: half a message is of no use."""

        def call(request: Any) -> Any:
            until, wait, repeated = time.monotonic() + PERSISTENCE, FIRST_WAIT, False
            while True:
                try:
                    reply = self._call(method, request)
                    if repeated and isinstance(reply, PushObjectResponse):
                        reply.stored = True  # the server may have stored it before the connection was lost
                    return reply
                except ConnectionLostError:
                    if time.monotonic() > until or self._stop.wait(wait):
                        raise
                    wait, repeated = min(2 * wait, 2.0), True

        return call

    def _call(self, method: Callable[[Any], Any], request: Any) -> Any:
        """Call a method of Flower's client, and turn its errors into sentences."""
        try:
            return method(request)
        except httpx.HTTPStatusError as error:
            raise self._refusal(error.response) from None
        except (httpx.TransportError, ValueError) as error:
            raise ConnectionLostError(f"the server at {self.address} does not respond ({error})") from None

    def _refusal(self, response: httpx.Response) -> FedcoverError:
        error = FlowerError.from_json(response.text)
        if response.headers.get(REVOKED_HEADER):
            return KeyRefusedError(
                f"the server at {self.address} does not accept this node's key: it was never registered there, or it"
                f" was revoked; ask the server's operator for a new key, or to copy node.pub into the folder `nodes`"
            )
        if response.status_code in UNAVAILABLE:
            return ConnectionLostError(f"the server at {self.address} is not ready (status {response.status_code})")
        if error is not None and error.code == NOT_ACTIVATED:
            return NotActivatedError(
                f"this node's key is not registered at the server at {self.address}, or another process uses it; copy"
                f" its node.pub into the folder `nodes` of the server's keys"
            )
        if error is not None and error.code == KEY_REQUIRED:
            return InputError(f"the server at {self.address} requires a key; give --keys FOLDER/node-0")
        text = error.message if error is not None else response.text[:200]
        return RefusedRequestError(
            f"the server at {self.address} refused a request (status {response.status_code}): {text}"
        )


@contextlib.contextmanager
def _lost_messages(what: str) -> Iterator[None]:
    """Turn Flower's errors about single messages into ours: a node continues with the next message."""
    try:
        yield
    except FedcoverError:
        raise
    except (
        ObjectPullError,
        ObjectPushError,
        UnexpectedObjectContentError,
        ValueError,
        TypeError,
        LookupError,
    ) as error:
        raise RefusedRequestError(f"{what}: {one_line(error)}") from error


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return a node's private key; raise InputError if the file is not one."""
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a readable private key ({error}); copy it again") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path} is not a key of `fedcover deploy keys`; copy it again")
    return key
