"""What the gate answers to requests that it does not forward."""

REVOKED_HEADER = "fedcover-key-refused"
"""The header of a response to a node whose key the server does not accept."""
