"""Check whether a SuperLink responds at an address, and explain why not in one sentence."""

import http.client
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from fedcover.deploy.address import parse_address
from fedcover.errors import FedcoverError, InputError

EXPIRED, OTHER_HOST, OTHER_ADDRESS = 10, 62, 64
"""OpenSSL's codes of invalid certificates."""
TIMEOUT = 5.0
"""Seconds that a server has to respond."""


class NoResponseError(FedcoverError):
    """No server responds yet; waiting may help."""


def check_server(address: str, ca: Path | None) -> None:
    """Raise an error unless a SuperLink responds.

    Args:
        address: HOST:PORT.
        ca: The authority's certificate, for TLS; None for plain text.

    Raises:
        NoResponseError: If nothing responds; waiting may help.
        InputError: If something else responds, or its certificate is not valid; the message has the remedy.
    """
    host, port = parse_address(address)
    server = f"{host}:{port}"
    try:
        status = _health_status(host, port, ca)
    except ssl.SSLCertVerificationError as error:
        raise InputError(_certificate_problem(error, host, server, ca)) from None
    except ssl.SSLError:
        raise InputError(
            f"{server} does not use TLS; start the server with --keys, or give --insecure on both ends if you control"
            " the whole network between them"
        ) from None
    except (http.client.BadStatusLine, ConnectionResetError):
        if ca is not None:
            raise NoResponseError(f"{server} closed the connection; see the server's log") from None
        raise InputError(
            f"{server} does not respond in plain text, since the server uses certificates; give --keys with the folder"
            " for this machine instead of --insecure"
        ) from None
    except http.client.HTTPException:
        raise InputError(f"{server} is not a Flower server; check the address") from None
    except socket.gaierror:
        raise InputError(f"there is no host '{host}'; check the address") from None
    except OSError as error:
        reason = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise NoResponseError(
            f"no server responds at {server} ({reason}); start `fedcover deploy server` there, or check address and"
            f" firewall"
        ) from None
    if status != http.client.OK:
        raise InputError(f"{server} is not a Flower server (status {status}); check the address")


def wait_for_server(
    address: str, ca: Path | None, seconds: float, is_running: Callable[[], bool] = lambda: True
) -> None:
    """Wait until a SuperLink responds.

    Args:
        address: HOST:PORT.
        ca: The authority's certificate, for TLS; None for plain text.
        seconds: The maximum time to wait.
        is_running: Returns False once waiting is of no use.

    Raises:
        NoResponseError: If nothing responds in time.
        InputError: As ``check_server``.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            check_server(address, ca)
            return
        except NoResponseError:
            if time.monotonic() > until or not is_running():
                raise
            time.sleep(0.2)


def _health_status(host: str, port: int, ca: Path | None) -> int:
    if ca is None:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=_trust(ca))
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def _trust(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"{ca} is not a readable certificate ({error}); copy it again") from None


def _certificate_problem(error: ssl.SSLCertVerificationError, host: str, server: str, ca: Path | None) -> str:
    if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        return (
            f"the certificate of {server} is not for '{host}'; use a host name that the certificate has, or create keys"
            f" with --host {host}"
        )
    if error.verify_code == EXPIRED:
        return f"the certificate of {server} has expired; create new keys with `fedcover deploy keys`"
    return (
        f"the certificate of {server} was not signed by the authority in {ca}; copy ca.crt again from the folder of the"
        " server's keys, or check the address"
    )
