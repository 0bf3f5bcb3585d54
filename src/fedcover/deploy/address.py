"""Network addresses: parsing HOST:PORT, loopback hosts and free ports."""

import contextlib
import ipaddress
import random
import socket

from fedcover.errors import InputError

MAX_PORT = 65535
LOOPBACK_HOST = "127.0.0.1"
UNUSED = range(10_000, 32_768)
"""Ports that no system gives to connections."""


def parse_address(text: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; PORT without a host is on this machine.

    >>> parse_address("10.0.0.7:5201"), parse_address("5201")
    (('10.0.0.7', 5201), ('127.0.0.1', 5201))
    """
    host, _, port = text.strip().rpartition(":")
    if not port.isdecimal() or not port.isascii() or len(port) > 5 or int(port) > MAX_PORT:
        raise InputError(
            f"'{text}' is not an address; give HOST:PORT with a port of at most {MAX_PORT}, such as 10.0.0.7:5201"
        )
    return host.strip("[]") or LOOPBACK_HOST, int(port)


def on_loopback(host: str) -> bool:
    """Return whether a host can be reached only from this machine.

    >>> on_loopback("127.0.0.1"), on_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_family(host: str) -> socket.AddressFamily:
    """Return IPv6 for a host with a colon, else IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_ports(count: int, host: str = LOOPBACK_HOST) -> list[int]:
    """Return different random ports that are free now.

    They are not among those that systems give to connections, of which any may be in use a moment later.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(UNUSED, len(UNUSED)):
            if len(ports) == count:
                break
            sock = stack.enter_context(socket.socket(address_family(host)))
            with contextlib.suppress(OSError):  # it is in use
                sock.bind((host, port))
                ports.append(port)
    if len(ports) < count:
        raise InputError(f"{host} has no free port from {UNUSED.start} to {UNUSED.stop - 1}; give a port")
    return ports


def check_port_free(host: str, port: int) -> None:
    """Raise InputError unless a server could listen at this host and port."""
    try:
        with socket.socket(address_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InputError(f"cannot listen on {host}:{port} ({reason}); give another --host or --port") from None
