"""The file in a run folder that maps nodes to clients.

It is separate from ``registry`` so that it can be read without importing Flower, which takes seconds.
"""

FILE = "clients.json"
NODE = "node"
"""The key of a client's node; it is informative only, since node ids may change."""

CLAIMED = "claimed_capacity"
"""The key of the capacity that a client claimed, where it was cut; it is informative only."""
