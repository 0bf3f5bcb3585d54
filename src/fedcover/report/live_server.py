"""A server of live pages for browsers on this machine."""

import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from fedcover.errors import InputError
from fedcover.report.live_page import LivePage

LOOPBACK = "127.0.0.1"


class LiveServer(ThreadingHTTPServer):
    """Serves one live page on the loopback interface, and only under the names of this machine."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise InputError(f"port {port} cannot be used ({error}); give another --port, or none") from error
        self.live_page = page

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """The host names under which the page may be requested.

        Any other name would be that of a web site that directs its visitors' browsers to this server.
        """
        return {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close a connection early; print other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "fedcover", ""

    def do_GET(self) -> None:
        """Answer with the page, with its main part, or with the progress of the run."""
        if self.headers.get("Host", "") not in self.server.hosts:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", f"open {self.server.url}\n")
            return
        page = self.server.live_page
        match urlsplit(self.path).path:
            case "/":
                self._send(HTTPStatus.OK, "text/html", page.page())
            case "/main":
                version, body = page.main()
                self._send(HTTPStatus.OK, "application/json", json.dumps({"version": version, "main": body}))
            case "/status":
                self._send(HTTPStatus.OK, "application/json", json.dumps(page.status()))
            case _:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", f"open {self.server.url}\n")

    def _send(self, status: HTTPStatus, kind: str, body: str) -> None:
        content = body.encode("utf-8", errors="replace")
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: requests come every second."""
