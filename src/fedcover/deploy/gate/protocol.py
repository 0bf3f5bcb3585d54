"""The gate's HTTP connections: idle ones are closed.

uvicorn closes an idle connection only after its first request.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0
"""Seconds for which a connection may be without a request; a request must have arrived up to its body by then."""
LOOK = 5.0
"""Seconds between looks at a connection."""


class GateProtocol(H11Protocol):
    """HTTP/1.1 with a limit on idle connections."""

    _look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to look at a connection."""
        super().connection_made(transport)
        self._busy = self.loop.time()
        self._look = self.loop.call_later(LOOK, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget a connection."""
        super().connection_lost(exc)
        if self._look is not None:
            self._look.cancel()

    def _close_if_idle(self) -> None:
        now = self.loop.time()
        if self.cycle is not None and not self.cycle.response_complete:
            self._busy = now
        if now - self._busy > IDLE_SECONDS:
            self.transport.close()
        else:
            self._look = self.loop.call_later(LOOK, self._close_if_idle)
