"""Rounds over a network: the wire format, Flower's apps and strategy, and the processes of a deployment."""
