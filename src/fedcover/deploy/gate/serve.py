"""The gate as a server in a thread of this process."""

import ssl
import threading
import time

import httpx
import uvicorn

from fedcover.deploy.address import check_port_free
from fedcover.deploy.gate.allowed_keys import AllowedKeys
from fedcover.deploy.gate.gate import TIMEOUT, Gate, Refused
from fedcover.deploy.gate.listener import GateLoop, Listener, connection_limit
from fedcover.deploy.gate.protocol import GateProtocol
from fedcover.deploy.processes.keys import ServerKeys
from fedcover.errors import FedcoverError

START_SECONDS = 10.0
MAX_CONNECTIONS = 4096
"""Connections at once; further ones are closed."""
MAX_HEAD_BYTES = 32 * 1024
"""The size limit of the first lines of a request."""
KEEP_ALIVE = 30
"""Seconds for which an idle connection stays open."""


class GateServer:
    """A gate that listens at a host and a port, with the server's certificate if it has keys.

    Close it, or use it with ``contextlib.closing``.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        superlink: HOST:PORT of the SuperLink.
        keys: The server's keys; None for plain text.
        allowed: The keys of nodes that may pass; None lets everybody pass.
        on_refused: Called for each request that is not forwarded.
    """

    def __init__(
        self,
        host: str,
        port: int,
        superlink: str,
        keys: ServerKeys | None,
        allowed: AllowedKeys | None,
        on_refused: Refused = lambda peer, reason: None,
    ) -> None:
        check_port_free(host, port)
        trust: ssl.SSLContext | bool = ssl.create_default_context(cafile=keys.ca) if keys else False
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=64)
        client = httpx.AsyncClient(verify=trust, timeout=TIMEOUT, limits=limits, trust_env=False)
        self.gate = Gate(f"{'https' if keys else 'http'}://{superlink}", client, allowed, on_refused)
        try:
            self.listener = Listener(host, port, connection_limit(MAX_CONNECTIONS))
        except OSError as error:  # another process took the port a moment ago
            raise FedcoverError(f"the gate cannot listen at {host}:{port} ({error.strerror})") from error
        config = uvicorn.Config(
            self.gate.application, log_level="critical", access_log=False, lifespan="on",
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            http=GateProtocol, ws="none", loop=f"{GateLoop.__module__}:{GateLoop.__name__}",
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=2, server_header=False,
            ssl_certfile=keys.certificate if keys else None, ssl_keyfile=keys.key if keys else None,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self.listener],), name="gate", daemon=True)
        self._thread.start()
        until = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                raise FedcoverError(f"the gate cannot listen at {host}:{port}; see the lines above")
            time.sleep(0.02)

    @property
    def running(self) -> bool:
        """Whether it still serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop listening, and wait until open requests have ended."""
        self._server.should_exit = True
        self._thread.join(5.0)
