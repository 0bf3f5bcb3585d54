"""The server's time on a node whose own clock may be wrong."""

import datetime
import email.utils
import time

TIME_HEADER = "fedcover-time"
"""The header in which the gate sends its time, in seconds since 1970; ``Date`` has whole seconds only."""


class ServerClock:
    """The time of a server, as its responses report it.

    Flower signs every request with the time, and a server refuses a time that is far from its own. A node therefore
    signs with the server's time. Until the first response that is the node's own.

    >>> clock = ServerClock()
    >>> clock.observe({"fedcover-time": str(time.time() + 3600)})
    >>> round(clock.ahead)
    -3600
    """

    def __init__(self) -> None:
        self._base: float | None = None
        self.ahead = 0.0
        """Seconds by which this machine's clock was ahead of the server's when last compared."""

    def observe(self, headers: "dict[str, str]") -> None:
        """Compare the clocks, from the headers of a response; keys are in lower case."""
        seconds = server_time(headers)
        if seconds is not None:
            self.ahead = time.time() - seconds
            self._base = seconds - time.monotonic()  # a later change of this machine's clock has no effect

    def seconds(self) -> float:
        """Return the server's time in seconds since 1970."""
        return time.time() if self._base is None else self._base + time.monotonic()

    def now(self) -> datetime.datetime:
        """Return the server's time."""
        return datetime.datetime.fromtimestamp(self.seconds(), datetime.UTC)


def server_time(headers: "dict[str, str]") -> float | None:
    """Return the server's time from the headers of a response; None if they have none."""
    try:
        if text := headers.get(TIME_HEADER):
            return float(text)
        if text := headers.get("date"):
            return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        pass
    return None
