"""A node: a device that joins a server, reports which client it is, and trains what it receives."""
