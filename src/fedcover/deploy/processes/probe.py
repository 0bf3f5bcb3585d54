"""Whether a SuperLink answers at an address, and if not, what is wrong in one sentence."""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path

from fedcover.deploy.bandwidth import address_of
from fedcover.errors import FedcoverError, InputError

EXPIRED, OTHER_HOST, OTHER_ADDRESS = 10, 62, 64
"""OpenSSL's numbers for what can be wrong with a certificate."""
SILENCE = 5.0


class NoAnswerError(FedcoverError):
    """Nothing answers yet; waiting may help."""


def on_loopback(host: str) -> bool:
    """Whether only this machine itself can reach a host.

    >>> on_loopback("127.0.0.1"), on_loopback("0.0.0.0")
    (True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_answers(address: str, ca: Path | None) -> None:
    """Nothing if a SuperLink answers over TLS (or in plain text without ``ca``); else an error with the remedy."""
    host, port = address_of(address)
    where = f"{host}:{port}"
    try:
        if ca is None:
            connection = http.client.HTTPConnection(host, port, timeout=SILENCE)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=SILENCE, context=_trusting(ca))
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        finally:
            connection.close()
    except ssl.SSLCertVerificationError as error:
        raise InputError(_about_certificate(error, host, where, ca)) from None
    except ssl.SSLError:
        raise InputError(
            f"{where} does not speak TLS; start the server with --keys, or give --insecure on both ends if all of the"
            " network between them is yours"
        ) from None
    except (http.client.BadStatusLine, ConnectionResetError):
        if ca is not None:
            raise NoAnswerError(f"{where} closed the connection; see the server's log") from None
        raise InputError(
            f"{where} does not answer in plain text, as a server with certificates does not; give --keys with the"
            " folder made for this machine instead of --insecure"
        ) from None
    except http.client.HTTPException:
        raise InputError(f"{where} is no Flower server; check the address") from None
    except socket.gaierror:
        raise InputError(f"there is no host '{host}'; check the address") from None
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise NoAnswerError(
            f"nothing answers at {where} ({why}); start `fedcover deploy server` there, or check address and firewall"
        ) from None
    if status != http.client.OK:
        raise InputError(f"{where} is no Flower server (it answers {status}); check the address")


def wait_for_answer(address: str, ca: Path | None, seconds: float, going_on: Callable[[], bool] = lambda: True) -> None:
    """Nothing as soon as a SuperLink answers; an error after so many seconds, or when it is not ``going_on``."""
    until = time.monotonic() + seconds
    while True:
        try:
            check_answers(address, ca)
            return
        except NoAnswerError:
            if time.monotonic() > until or not going_on():
                raise
            time.sleep(0.2)


def _trusting(ca: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"{ca} is no certificate that can be read ({error}); copy it anew") from None


def _about_certificate(error: ssl.SSLCertVerificationError, host: str, where: str, ca: Path | None) -> str:
    if error.verify_code in (OTHER_HOST, OTHER_ADDRESS):
        return (
            f"the certificate of {where} is not for '{host}'; reach the server by a name it was made for, or make keys"
            f" with --host {host}"
        )
    if error.verify_code == EXPIRED:
        return f"the certificate of {where} has expired; make new keys with `fedcover deploy keys`"
    return (
        f"the certificate of {where} was not signed by the authority in {ca}; copy ca.crt anew from where the server's"
        " keys were made, or check the address"
    )
