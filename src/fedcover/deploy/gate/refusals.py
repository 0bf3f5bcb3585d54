"""What the gate answers to requests that it does not forward."""

from dataclasses import dataclass, field

REVOKED_HEADER = "fedcover-key-refused"
"""The header of a response to a node whose key the server does not accept."""

LOG_EVERY = 60.0
"""Seconds between lines about one peer."""
MAX_PEERS = 10_000


@dataclass(frozen=True)
class Refusal:
    """A refusal, of one of a few kinds, by which refusals are counted."""

    status: int
    kind: str
    text: str = ""
    """What is answered; the kind if it is empty."""
    headers: dict[str, str] = field(default_factory=dict)


class RefusalLog:
    """Decides which refusals are logged: the first of a peer, and then one a minute, so that no peer can fill a log.

    >>> log = RefusalLog()
    >>> [log.count("a", now) for now in (0.0, 1.0, 2.0, 61.0)]
    [1, 0, 0, 3]
    """

    def __init__(self) -> None:
        self._peers: dict[str, tuple[float, int]] = {}

    def count(self, peer: str, now: float) -> int:
        """Return how many refusals of a peer a line stands for; 0 if there is none to write."""
        until, waiting = self._peers.get(peer, (now, 0))
        if now < until:
            self._peers[peer] = (until, waiting + 1)
            return 0
        if len(self._peers) >= MAX_PEERS:
            self._peers.clear()
        self._peers[peer] = (now + LOG_EVERY, 0)
        return waiting + 1


NOT_FORWARDED = Refusal(404, "the gate does not forward this")
NOT_SIGNED = Refusal(401, "the request has no valid signature")
UNKNOWN_KEY = Refusal(403, "the key is not registered, or was revoked", headers={REVOKED_HEADER: "1"})
TOO_LARGE = Refusal(413, "the request is too large")
