"""Imported by every Python process that has this folder on its path: note each address that it connects or binds to."""

import os
import sys

EVENTS = ("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto")


def note(event: str, arguments: tuple) -> None:
    """Append an event of the network to this process's file."""
    if event in EVENTS:
        where = arguments[:2] if event == "socket.getaddrinfo" else arguments[1]
        command = " ".join(sys.orig_argv[1:5])
        with open(os.path.join(os.environ["FEDCOVER_TEST_NETWORK"], str(os.getpid())), "a") as file:
            file.write(f"{event.removeprefix('socket.')}\t{where!r}\t{command}\n")


if os.environ.get("FEDCOVER_TEST_NETWORK"):
    sys.addaudithook(note)
