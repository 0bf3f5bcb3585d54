"""One Flower program, run under a warden, with its lines in a log file."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcover.deploy.processes import supervisor
from fedcover.deploy.processes.closing import Closing
from fedcover.errors import FedcoverError, InputError

LONGEST_END = 2 * (supervisor.PATIENCE * 1.5 + 4.0)
"""Seconds after which a warden that was asked to end is given up on: twice what it takes at most."""
LEVEL = re.compile(r"^(?:\S+Z )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) *:?(?: +|$)(?:\[[\w.]+\] )?")
NOISE = re.compile(
    r"uvicorn|^INFO: {5}|FastAPI lifespan|SuperLinkLifespan|^Using SuperLink:|Starting logstream|Starting Flower"
    r"|HTTP API on|Option `--insecure`|For more information, visit:|^ControlServicer\."
)


class ChildProcess(Closing):
    """A program of Flower's as a process that ends with this one; a context manager.

    ``lines`` gives what it printed since the last call, ``code`` its exit code, None as long as it goes on.
    """

    def __init__(self, command: Sequence[str], log: str | Path, environment: Mapping[str, str]) -> None:
        self.log = Path(log).absolute()
        self._read, self._rest = 0, ""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._read = self.log.stat().st_size if self.log.exists() else 0
            with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", supervisor.__file__, str(os.getpid()), "--", *command],
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environment),
                    start_new_session=True,  # Ctrl-C is for the starter, who then ends this
                )  # fmt: skip
        except OSError as error:
            raise InputError(f"{self.log} cannot be written ({error.strerror}); name a folder you own") from error
        self._first = self._read

    @property
    def pid(self) -> int:
        """The warden's process id; the program and all it starts are below it."""
        return self._supervisor.pid

    @property
    def code(self) -> int | None:
        """The program's exit code; None as long as it goes on."""
        return self._supervisor.poll()

    def processes(self) -> list[int]:
        """The ids of all processes of this program, the warden first; none when it has ended."""
        return [] if self.code is not None else [self.pid, *supervisor.below(self.pid)]

    def wait(self, seconds: float) -> int | None:
        """The exit code, after so many seconds at most."""
        try:
            return self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def lines(self) -> list[str]:
        """What was printed since the last call, fit to show."""
        with open(self.log, "rb") as file:
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *whole, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        if self.code is not None and self._rest:
            whole, self._rest = [*whole, self._rest], ""
        return [text for line in whole if (text := readable(line))]

    def printed(self) -> str:
        """All that this program printed."""
        with open(self.log, "rb") as file:
            file.seek(self._first)
            return file.read().decode(errors="replace")

    def ask_to_end(self) -> None:
        """Have it end, without waiting for that."""
        if self.code is None:
            self._supervisor.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the program and every process that it started, and wait until they are gone."""
        self.ask_to_end()
        if self.wait(LONGEST_END) is None:
            left = self.processes()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise FedcoverError(f"processes {left} did not end and were killed; see {self.log}")


def close_all(programs: Sequence[ChildProcess]) -> None:
    """End programs at the same time."""
    for program in programs:
        program.ask_to_end()
    for program in programs:
        program.close()


def readable(line: str) -> str:
    """A log line without its level unless that is a warning or worse; empty if it tells users nothing.

    >>> readable("INFO :      [RUN 1, ROUND 2]"), readable("WARNING :   careful"), readable("INFO:     Shutting down")
    ('[RUN 1, ROUND 2]', 'warning: careful', '')
    """
    line = supervisor.COLOURS.sub(b"", line.encode()).decode().rstrip()
    if NOISE.search(line):
        return ""
    if not (found := LEVEL.match(line)):
        return line
    text, level = line[found.end() :], found[1].lower()
    return text if level in ("info", "debug") or not text else f"{level}: {text}"
