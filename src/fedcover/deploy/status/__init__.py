"""The state of a fleet: a server publishes it in its folder, and commands, pages and metrics show it."""
