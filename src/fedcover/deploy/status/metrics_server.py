"""A server of metrics for a Prometheus on this machine."""

import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from fedcover.deploy.address import LOOPBACK_HOST
from fedcover.deploy.status.fleet_status import FleetStatus
from fedcover.deploy.status.metrics import OPEN_METRICS, TEXT, metrics_text
from fedcover.errors import InputError


class MetricsServer(ThreadingHTTPServer):
    """Serves ``/metrics`` on the loopback interface, in a thread, and only under the names of this machine.

    Close it, or use it with ``contextlib.closing``.

    Args:
        port: The port; 0 chooses a free one.
        latest: Returns the state to show.
    """

    daemon_threads = True

    def __init__(self, port: int, latest: Callable[[], FleetStatus]) -> None:
        try:
            super().__init__((LOOPBACK_HOST, port), _MetricsHandler)
        except OSError as error:
            raise InputError(
                f"port {port} cannot be used for metrics ({error.strerror}); give another --metrics-port"
            ) from None
        self.latest = latest
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the metrics."""
        return f"http://{LOOPBACK_HOST}:{self.server_port}/metrics"

    @property
    def hosts(self) -> set[str]:
        """The host names under which it may be requested; another would be that of a web site."""
        return {f"{name}:{self.server_port}" for name in (LOOPBACK_HOST, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close a connection early; print other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self._thread.join(5.0)
        self.server_close()


class _MetricsHandler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version, sys_version = "fedcover", ""
    timeout = 10

    def do_GET(self) -> None:
        """Answer with the metrics, in the format that the request accepts."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"open {self.server.url}\n")
        elif urlsplit(self.path).path != "/metrics":
            self._send(HTTPStatus.NOT_FOUND, "text/plain", f"open {self.server.url}\n")
        else:
            open_metrics = "application/openmetrics-text" in self.headers.get("Accept", "")
            text = metrics_text(self.server.latest(), open_metrics)
            self._send(HTTPStatus.OK, OPEN_METRICS if open_metrics else TEXT, text)

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        content = body.encode()
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "X-Content-Type-Options": "nosniff"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests come every few seconds."""
