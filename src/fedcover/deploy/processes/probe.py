"""Check whether a SuperLink responds at an address, and explain why not in one sentence."""

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedcover.deploy.address import parse_address
from fedcover.deploy.node.clock import server_time
from fedcover.errors import FedcoverError, InputError

NOT_YET_VALID, EXPIRED, OTHER_HOST, OTHER_ADDRESS = 9, 10, 62, 64
"""OpenSSL's codes of invalid certificates."""
CLOCK_PROBLEM = 60.0
"""Seconds by which clocks must differ to be named as the cause of a certificate that is not valid."""
TIMEOUT = 5.0
"""Seconds that a server has to respond."""


class NoResponseError(FedcoverError):
    """No server responds yet; waiting may help."""


def check_server(address: str, ca: Path | None, headers: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the headers of a server's response, with names in lower case; raise an error unless one responds.

    Args:
        address: HOST:PORT.
        ca: The authority's certificate, for TLS; None for plain text.
        headers: Headers of the request.

    Raises:
        NoResponseError: If nothing responds; waiting may help.
        InputError: If something else responds, or its certificate is not valid; the message has the remedy.
    """
    host, port = parse_address(address)
    server = f"{host}:{port}"
    try:
        status, answered = _health(host, port, ca, headers or {})
    except ssl.SSLCertVerificationError as error:
        raise InputError(_certificate_problem(error, host, server, ca)) from None
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise NoResponseError(f"{server} closed the connection; see the server's log") from None
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
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:
            raise NoResponseError(f"the name server does not respond, which is needed to find '{host}'") from None
        raise InputError(f"there is no host '{host}'; check the address") from None
    except OSError as error:
        reason = "timed out" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise NoResponseError(
            f"no server responds at {server} ({reason}); start `fedcover deploy server` there, or check address and"
            f" firewall"
        ) from None
    if status != http.client.OK:
        if status == http.client.SERVICE_UNAVAILABLE:
            raise NoResponseError(f"the server at {server} is not ready; see its log")
        raise InputError(f"{server} is not a Flower server (status {status}); check the address")
    return answered


def wait_for_server(
    address: str, ca: Path | None, seconds: float, is_running: Callable[[], bool] = lambda: True
) -> dict[str, str]:
    """Wait until a server responds, and return the headers of its response.

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
            return check_server(address, ca)
        except NoResponseError:
            if time.monotonic() > until or not is_running():
                raise
            time.sleep(0.2)


def _health(host: str, port: int, ca: Path | None, headers: Mapping[str, str]) -> tuple[int, dict[str, str]]:
    if ca is None:
        connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    else:
        connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=_trust(ca))
    try:
        connection.request("GET", "/health", headers=dict(headers))
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


def clock_ahead(host: str, port: int) -> float:
    """Return by how many seconds this machine's clock is ahead of a server's, whose certificate is not checked.

    It is only for a message about a certificate; 0 if it cannot be compared.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
    try:
        connection.request("GET", "/health")
        headers = {name.lower(): value for name, value in connection.getresponse().getheaders()}
    except (OSError, http.client.HTTPException):
        return 0.0
    finally:
        connection.close()
    seconds = server_time(headers)
    return 0.0 if seconds is None else time.time() - seconds


def duration(seconds: float) -> str:
    """Return a length of time in the unit that suits it.

    >>> duration(20), duration(-7300), duration(200000)
    ('20 seconds', '2 hours', '2 days')
    """
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if abs(seconds) >= 2 * size:
            return f"{abs(seconds) / size:.0f} {unit}"
    return f"{abs(seconds):.0f} seconds"


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
    if error.verify_code in (NOT_YET_VALID, EXPIRED):
        state = "has expired" if error.verify_code == EXPIRED else "is not valid yet"
        if abs(ahead := clock_ahead(host, int(server.rpartition(":")[2]))) > CLOCK_PROBLEM:
            return (
                f"the certificate of {server} {state} by this machine's clock, which is {duration(ahead)}"
                f" {'ahead of' if ahead > 0 else 'behind'} the server's; set the clock"
            )
        return f"the certificate of {server} {state}; create new keys with `fedcover deploy keys`"
    return (
        f"the certificate of {server} was not signed by the authority in {ca}; copy ca.crt again from the folder of the"
        " server's keys, or check the address"
    )
