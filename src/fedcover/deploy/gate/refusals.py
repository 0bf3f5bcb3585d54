"""What the gate answers to requests that it does not forward."""

from dataclasses import dataclass, field

REVOKED_HEADER = "fedcover-key-refused"
"""The header of a response to a node whose key the server does not accept."""


@dataclass(frozen=True)
class Refusal:
    """A refusal, of one of a few kinds, by which refusals are counted."""

    status: int
    kind: str
    text: str = ""
    """What is answered; the kind if it is empty."""
    headers: dict[str, str] = field(default_factory=dict)


NOT_FORWARDED = Refusal(404, "the gate does not forward this")
NOT_SIGNED = Refusal(401, "the request has no valid signature")
UNKNOWN_KEY = Refusal(403, "the key is not registered, or was revoked", headers={REVOKED_HEADER: "1"})
TOO_LARGE = Refusal(413, "the request is too large")
