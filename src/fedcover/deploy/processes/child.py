"""One Flower program, run under a supervisor, with its output in a log file."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcover._files import write_error
from fedcover.deploy.processes import supervisor
from fedcover.errors import FedcoverError

MAX_END_SECONDS = 2 * (supervisor.GRACE * 1.5 + 4.0)
"""Seconds after which a supervisor that was asked to end is killed: twice the longest time that it takes."""
LEVEL = re.compile(r"^(?:\S+Z )?(DEBUG|INFO|WARNING|ERROR|CRITICAL) *:?(?: +|$)(?:\[[\w.]+\] )?")
NOISE = re.compile(
    r"uvicorn|^INFO: {5}|FastAPI lifespan|SuperLinkLifespan|^Using SuperLink:|Starting logstream|Starting Flower"
    r"|Start `flwr-serverapp` process|Successfully installed fedcover-run|HTTP API on|Option `--insecure`"
    r"|For more information, visit:|^ControlServicer\."
)


class ChildProcess:
    """A program as a process that ends with this one.

    Close it, or use it with ``contextlib.closing``.

    Args:
        command: The program and its arguments.
        log: The file to which its output is appended.
        environment: Its environment variables.
    """

    def __init__(self, command: Sequence[str], log: str | Path, environment: Mapping[str, str]) -> None:
        self.log = Path(log).absolute()
        self._position, self._partial = 0, ""
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._position = self.log.stat().st_size if self.log.exists() else 0
            with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", supervisor.__file__, str(os.getpid()), "--", *command],
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environment),
                    start_new_session=True,  # Ctrl-C reaches only the parent, which then ends this process
                )  # fmt: skip
        except OSError as error:
            raise write_error(self.log, error) from error
        self._start = self._position

    @property
    def pid(self) -> int:
        """The process id of the supervisor; the program and all that it starts descend from it."""
        return self._supervisor.pid

    @property
    def code(self) -> int | None:
        """The exit code of the program; None while it runs."""
        return self._supervisor.poll()

    def processes(self) -> list[int]:
        """Return the ids of all processes of this program, the supervisor first; none once it has ended."""
        return [] if self.code is not None else [self.pid, *supervisor.descendants(self.pid)]

    def wait(self, seconds: float) -> int | None:
        """Wait for the exit code and return it; None if the program still runs after so many seconds."""
        try:
            return self._supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def lines(self) -> list[str]:
        """Return the lines printed since the last call, formatted for users."""
        with open(self.log, "rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        *complete, self._partial = (self._partial + data.decode(errors="replace")).split("\n")
        if self.code is not None and self._partial:
            complete, self._partial = [*complete, self._partial], ""
        return [text for line in complete if (text := format_line(line))]

    def printed(self) -> str:
        """Return everything that this program has printed."""
        with open(self.log, "rb") as file:
            file.seek(self._start)
            return file.read().decode(errors="replace")

    def terminate(self) -> None:
        """Ask the program to end, without waiting for it."""
        if self.code is None:
            self._supervisor.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the program and every process that it started, and wait until they have ended."""
        self.terminate()
        if self.wait(MAX_END_SECONDS) is None:
            left = self.processes()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise FedcoverError(f"processes {left} did not end and were killed; see {self.log}")


def format_line(line: str) -> str:
    """Return a log line without its level, unless that is a warning or worse; empty for lines of no use to users.

    >>> format_line("INFO :      [RUN 1, ROUND 2]"), format_line("WARNING :   careful")
    ('[RUN 1, ROUND 2]', 'warning: careful')
    >>> format_line("INFO:     Shutting down")
    ''
    """
    line = supervisor.COLOURS.sub(b"", line.encode()).decode().rstrip()
    if NOISE.search(line):
        return ""
    if not (match := LEVEL.match(line)):
        return line
    text, level = line[match.end() :], match[1].lower()
    return text if level in ("info", "debug") or not text else f"{level}: {text}"
