"""Checks of a server's machine and of a node's before they are started, each with a remedy."""
