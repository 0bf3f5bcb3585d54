"""A SuperLink as a child process, on loopback only: nodes reach the gate in front of it."""

import re
from pathlib import Path

from fedcover.deploy.address import LOOPBACK_HOST, check_port_free, free_ports
from fedcover.deploy.processes.child import ChildProcess, format_line
from fedcover.deploy.processes.environment import SERVER, find_program, flower_environment
from fedcover.deploy.processes.keys import ServerKeys
from fedcover.deploy.processes.probe import NoResponseError, wait_for_server
from fedcover.errors import FedcoverError, InputError

ATTEMPTS = 3
"""How often a start is tried if another process takes the free port in the meantime."""
START_SECONDS = 60.0
"""Seconds that a SuperLink may take to respond; 2 to 3 are usual."""
PORT_IN_USE = re.compile(r"address already in use|error while attempting to bind", re.IGNORECASE)


class SuperLink:
    """A running SuperLink that responds at ``address``.

    Close it, or use it with ``contextlib.closing``.

    Args:
        keys: The server's keys; None runs it without encryption.
        folder: The folder for its state and log.
        port: The port on loopback; 0 chooses a free one.
    """

    program: ChildProcess

    def __init__(self, keys: ServerKeys | None, folder: Path, port: int = 0) -> None:
        self._ca, self._folder = keys.ca if keys else None, folder
        command = [find_program("flower-superlink"), "--database", str(folder / "state.db"), "--host", LOOPBACK_HOST]
        if keys is None:
            command += ["--insecure"]
        else:
            command += ["--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate)]
            command += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
        try:
            self._start(command, port)
        except BaseException:
            self.close()
            raise

    def _start(self, command: list[str], port: int) -> None:
        for attempt in range(ATTEMPTS):
            self.port = port or free_ports(1)[0]
            check_port_free(LOOPBACK_HOST, self.port)
            self.address = f"{LOOPBACK_HOST}:{self.port}"
            environment = flower_environment(self._folder / "flwr-home") | SERVER
            self.program = ChildProcess(
                [*command, "--port", str(self.port)], self._folder / "superlink.log", environment
            )
            try:
                wait_for_server(self.address, self._ca, START_SECONDS, is_running=lambda: self.program.code is None)
                return
            except NoResponseError:
                self.program.close()
                if port == 0 and attempt + 1 < ATTEMPTS and PORT_IN_USE.search(self.program.printed()):
                    continue
                raise self.error() from None

    def error(self) -> FedcoverError:
        """Return why it ended, in one sentence."""
        return FedcoverError(
            f"the SuperLink ended with code {self.program.code}: {_last_error(self.program)}; see {self.program.log}"
        )

    def close(self) -> None:
        """End the SuperLink and all processes that it started."""
        if hasattr(self, "program"):
            self.program.close()


def check_security(keys: bool, insecure: bool, example: str) -> None:
    """Raise InputError unless there are keys or ``insecure`` is set, but not both."""
    if keys and insecure:
        raise InputError("--keys and --insecure exclude each other; give one of them")
    if not keys and not insecure:
        raise InputError(
            f"without keys nothing is encrypted and anyone can join; give --keys {example}, created by `fedcover deploy"
            " keys`, or --insecure on a network that only you use"
        )


def _last_error(program: ChildProcess) -> str:
    lines = [text for line in program.printed().splitlines() if (text := format_line(line).strip())]
    errors = [line for line in lines if re.search(r"error|exception|exit code", line, re.IGNORECASE)]
    return (errors or lines or ["it printed nothing"])[-1]
