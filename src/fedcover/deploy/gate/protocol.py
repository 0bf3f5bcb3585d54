"""The gate's connections: idle ones are closed, and one peer has only so many.

uvicorn closes an idle connection only after its first request, so connections that never send one would use up the
server's file descriptors.
"""

import asyncio
import resource
from collections import Counter
from typing import ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0
"""Seconds for which a connection may be without a request; a request must have arrived up to its body by then."""
LOOK = 5.0
"""Seconds between looks at a connection."""
MAX_PER_PEER = 512
"""Connections of one address at once."""
SPARE_FILES = 256
"""File descriptors that the rest of the process needs."""


class GateProtocol(H11Protocol):
    """HTTP/1.1 with limits on idle connections and on connections of one address."""

    peers: ClassVar[Counter[str]] = Counter()
    """Open connections by address."""
    _peer = ""
    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, unless its address has too many."""
        super().connection_made(transport)
        self._peer = self.client[0] if self.client else ""
        self.peers[self._peer] += 1
        self._busy = self.loop.time()
        if self.peers[self._peer] > MAX_PER_PEER:
            transport.close()
        else:
            self._look = self.loop.call_later(LOOK, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()
        self.peers[self._peer] -= 1
        if not self.peers[self._peer]:
            del self.peers[self._peer]

    def _close_if_idle(self) -> None:
        now = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._busy = now
        if now - self._busy > IDLE_SECONDS:
            self.transport.close()
        else:
            self._look = self.loop.call_later(LOOK, self._close_if_idle)


def connection_limit(wanted: int) -> int:
    """Raise the limit of open files as far as allowed, and return how many connections there is then room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 16
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16), hard))
        soft = min(most, 1 << 16)
    return max(16, min(wanted, soft - SPARE_FILES))
