"""An HTTP application that stands between nodes and a SuperLink.

A SuperLink serves nodes, operators and its own workers on one port, and asks an operator for no credential: whoever
reaches the port can run code on the server and on Flower's own nodes. So the SuperLink listens on loopback only, and
nodes reach this gate. It forwards the methods that nodes need and no others, from nodes whose key is registered now,
with limits on size and number. A request is refused by its first lines, before its body is read.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
from flwr.supercore.constant import (
    FLWR_COMPONENT_NAME_METADATA_KEY,
    FLWR_PACKAGE_NAME_METADATA_KEY,
    FLWR_PACKAGE_VERSION_METADATA_KEY,
    VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY,
)
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fedcover.deploy.gate.allowed_keys import AllowedKeys
from fedcover.deploy.gate.contents import message_problem, object_problem
from fedcover.deploy.gate.refusals import NOT_FORWARDED, TOO_LARGE, Refusal
from fedcover.deploy.gate.signatures import HEADERS, authenticate
from fedcover.deploy.node.clock import TIME_HEADER
from fedcover.deploy.text import one_line
from fedcover.deploy.versions import VERSIONS_HEADER, installed_versions, versions_text

MIB = 1 << 20
MAX_BYTES = {
    "activate-node": 16 * 1024,
    "deactivate-node": 16 * 1024,
    "send-node-heartbeat": 16 * 1024,
    "pull-messages": 64 * 1024,
    "push-messages": 4 * MIB,
    "get-run": 16 * 1024,
    "get-fab": 16 * 1024,
    "push-object": 32 * MIB,
    "pull-object": 64 * 1024,
    "confirm-message-received": 64 * 1024,
}
"""The methods of Flower's Fleet API that nodes with keys use, and the size limit of each request. Flower splits arrays
into objects of at most 20 MiB."""
KEYLESS = {"register-node": 16 * 1024, "unregister-node": 16 * 1024}
"""Methods by which nodes without keys register, for a server that runs without encryption."""
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
FORWARDED = (
    *HEADERS, FLWR_PACKAGE_NAME_METADATA_KEY, FLWR_PACKAGE_VERSION_METADATA_KEY, FLWR_COMPONENT_NAME_METADATA_KEY,
    "content-type", "accept",
)  # fmt: skip
"""Headers of requests that are forwarded."""
RETURNED = ("content-type", VERSION_INCOMPATIBILITY_MESSAGE_METADATA_KEY)
"""Headers of answers that are returned."""
CONTENTS: dict[str, Callable[[bytes], str]] = {"push-object": object_problem, "push-messages": message_problem}
"""Functions that return why the body of a request is refused."""
MAX_AT_ONCE, MAX_AT_ONCE_KEYLESS = 8, 256
"""Requests of one node that are served at once; others wait unread. Nodes without keys cannot be distinguished."""
TRANSFER_SECONDS = 300.0
"""Seconds for a request and its answer."""
ANY = "any"
"""The name of nodes without keys."""

Refused = Callable[[str, str], None]
"""Called with the peer's address and the reason for which its request was refused."""


class Gate:
    """The application, and what it has counted.

    Args:
        upstream: The URL of the SuperLink.
        client: The HTTP client that reaches it.
        keys: The keys that may pass; None lets everybody pass, for a server without encryption.
        on_refused: Called for each request that is not forwarded.
    """

    def __init__(
        self,
        upstream: str,
        client: httpx.AsyncClient,
        keys: AllowedKeys | None,
        on_refused: Refused = lambda peer, reason: None,
    ) -> None:
        self._upstream, self._client, self._keys, self._on_refused = upstream, client, keys, on_refused
        self._limits = MAX_BYTES if keys is not None else MAX_BYTES | KEYLESS
        self.refusals: Counter[str] = Counter()
        """The number of refused requests by reason."""
        self.last_seen: dict[str, float] = {}
        """The time of the last request of each node, by its name."""
        self.received: Counter[str] = Counter()
        """Bytes received by the name of the node."""
        self.sent: Counter[str] = Counter()
        """Bytes sent by the name of the node."""
        self._slots: dict[str, asyncio.Semaphore] = {}
        self.application = Starlette(
            routes=[
                Route("/health", self._health, methods=["GET"]),
                Route("/v1/fleet/{method}", _Application(self._serve), methods=["POST"]),
            ],
            exception_handlers={404: self._not_found, 405: self._not_found},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, application: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def _health(self, request: Request) -> Response:
        try:
            status = (await self._client.get(f"{self._upstream}/health")).status_code
        except httpx.HTTPError:
            status = 503
        ready = status == 200
        return _timed(PlainTextResponse("ok" if ready else "not ready", 200 if ready else 503, self._about(request)))

    def _about(self, request: Request) -> dict[str, str]:
        """Return headers for whoever asks for the health: the versions, but only if its key may pass."""
        refusal = authenticate(request, self._keys)[1] if self._keys is not None else None
        return {VERSIONS_HEADER: versions_text(installed_versions())} if refusal is None else refusal.headers

    async def _not_found(self, request: Request, error: Exception) -> Response:
        return self._refuse(request, NOT_FORWARDED, f"not a method of nodes: {request.url.path}")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a node: its name decides how many are served at once, until the answer has been read."""
        request = Request(scope, receive)
        method = request.path_params["method"]
        if method not in self._limits:
            await (await self._not_found(request, ValueError(method)))(scope, receive, send)
            return
        node = ANY
        if self._keys is not None:
            key, refusal = authenticate(request, self._keys)
            if refusal is not None:
                await self._refuse(request, refusal)(scope, receive, send)
                return
            node = self._keys.name(key)
        slots = self._slots.setdefault(node, asyncio.Semaphore(MAX_AT_ONCE if self._keys else MAX_AT_ONCE_KEYLESS))
        with contextlib.suppress(TimeoutError):
            async with slots, asyncio.timeout(TRANSFER_SECONDS):
                response = await self._forward(request, method, node)
                await response(scope, receive, send)

    async def _forward(self, request: Request, method: str, node: str) -> Response:
        """Return the SuperLink's answer to a request."""
        try:
            body = await read_body(request, self._limits[method])
        except ClientDisconnect:
            return Response(status_code=400)
        if body is None:
            return self._refuse(request, TOO_LARGE, f"{method} of {node} is too large")
        check = CONTENTS.get(method)
        if check is not None and (problem := check(body)):
            return self._refuse(request, Refusal(400, "the contents are not valid", problem), f"{node}: {problem}")
        self.last_seen[node] = time.time()
        self.received[node] += len(body)
        headers = {name: request.headers[name] for name in FORWARDED if name in request.headers}
        try:
            answer = await self._client.post(f"{self._upstream}/v1/fleet/{method}", content=body, headers=headers)
        except httpx.HTTPError:
            return _timed(PlainTextResponse("the server is not ready", 503))
        self.sent[node] += len(answer.content)
        kept = {name: answer.headers[name] for name in RETURNED if name in answer.headers}
        return _timed(Response(answer.content, answer.status_code, kept))

    def _refuse(self, request: Request, refusal: Refusal, reason: str = "") -> Response:
        """Return the answer to a request that is not forwarded; count it, and report it with the reason."""
        text = refusal.text or refusal.kind
        self.refusals[refusal.kind] += 1
        self._on_refused(request.client.host if request.client else "unknown", one_line(reason or text))
        return _timed(JSONResponse({"detail": text}, refusal.status, {**refusal.headers, "connection": "close"}))


class _Application:
    """A function as an application, which Starlette would otherwise take for a handler that returns a response."""

    def __init__(self, function: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._function = function

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._function(scope, receive, send)


async def read_body(request: Request, limit: int) -> bytes | None:
    """Return the body of a request; None as soon as it is larger than allowed."""
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 15 or int(length) > limit:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


def _timed(response: Response) -> Response:
    """Return a response with the server's time, by which nodes correct their clocks."""
    response.headers[TIME_HEADER] = f"{time.time():.3f}"
    return response
