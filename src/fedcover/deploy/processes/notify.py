"""Messages to systemd, for services of ``Type=notify``: that a service is ready, and that it still runs."""

import os
import socket

READY, RUNS = "READY=1", "WATCHDOG=1"


def notify_service_manager(message: str) -> None:
    """Send a message to the service manager that started this process; do nothing if there is none.

    Args:
        message: ``READY`` or ``RUNS``.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as connection:
            connection.setblocking(False)  # a manager that does not read must not stop the service
            connection.sendto(message.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)
    except OSError:
        return
