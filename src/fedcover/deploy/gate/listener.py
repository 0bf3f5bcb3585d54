"""The gate's listening sockets: they accept only so many connections at once, and only so many of one address.

asyncio counts a connection only after its TLS handshake. Connections that never begin one would use up the process's
file descriptors; asyncio would then log each failure to accept another, thousands of times a second.
"""

import asyncio
import errno
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fedcover.deploy.address import address_family

MAX_PER_PEER = 512
"""Connections of one address at once."""
SPARE_FILES = 512
"""File descriptors that the rest of the process needs: connections to the SuperLink, logs and keys."""
HANDSHAKE_SECONDS = 10.0
"""Seconds for a TLS handshake."""
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_FILES_PAUSE = 0.05
"""Seconds before the next attempt if the system is short of file descriptors."""


class Connection(socket.socket):
    """An accepted connection that reports its end."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Close the connection."""
        if (report := self.on_close) is not None:
            self.on_close = None
            report()
        super().close()


class Listener(socket.socket):
    """A listening socket with limits; connections beyond them are closed at once.

    Args:
        host: The address to listen on.
        port: The port to listen on.
        most: The number of connections at once.
    """

    def __init__(self, host: str, port: int, most: int) -> None:
        super().__init__(address_family(host), socket.SOCK_STREAM)
        self._most = most
        self.peers: Counter[str] = Counter()
        """Open connections by address."""
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if self.family == socket.AF_INET6:
                self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self.bind((host, port))
        except OSError:
            self.close()
            raise

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection within the limits.

        Raises:
            BlockingIOError: If there is none now, as asyncio expects.
        """
        try:
            accepted, address = super().accept()
        except OSError as error:
            if error.errno not in NO_FILES:
                raise
            time.sleep(NO_FILES_PAUSE)
            raise BlockingIOError(error.errno, error.strerror) from None
        peer = str(address[0])
        if self.peers.total() >= self._most or self.peers[peer] >= MAX_PER_PEER:
            accepted.close()
            raise BlockingIOError(errno.EAGAIN, "too many connections")
        connection = Connection(fileno=accepted.detach())
        self.peers[peer] += 1
        connection.on_close = lambda: self._forget(peer)
        return connection, address

    def _forget(self, peer: str) -> None:
        self.peers[peer] -= 1
        if not self.peers[peer]:
            del self.peers[peer]


class GateLoop(asyncio.SelectorEventLoop):
    """An event loop whose servers wait only so long for a TLS handshake."""

    async def create_server(self, *arguments: Any, **options: Any) -> asyncio.Server:
        """Return a server, as asyncio does."""
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
        return await super().create_server(*arguments, **options)


def connection_limit(wanted: int) -> int:
    """Raise the limit of open files as far as allowed, and return how many connections there is then room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16), hard))
        soft = min(most, 1 << 16)
    return max(16, min(wanted, soft - SPARE_FILES))
