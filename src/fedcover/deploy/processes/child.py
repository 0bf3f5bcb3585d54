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
MAX_LOG_BYTES = 10 << 20
MAX_PRINTED = 1 << 16
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
        max_bytes: The size at which the file is renamed to ``LOG.1``.
    """

    def __init__(
        self, command: Sequence[str], log: str | Path, environment: Mapping[str, str], max_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self.log = Path(log).absolute()
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                state = os.fstat(file.fileno())
                self._inode, self._start = state.st_ino, state.st_size
                arguments = [str(os.getpid()), str(self.log), str(max_bytes)]
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-I", supervisor.__file__, *arguments, "--", *command],
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=dict(environment),
                    start_new_session=True,  # Ctrl-C reaches only the parent, which then ends this process
                )  # fmt: skip
        except OSError as error:
            raise write_error(self.log, error) from error

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

    def printed(self) -> str:
        """Return the last output of this program, at most ``MAX_PRINTED`` bytes of its present log file."""
        try:
            with open(self.log, "rb") as file:
                state = os.fstat(file.fileno())
                start = self._start if state.st_ino == self._inode else 0
                file.seek(max(start, state.st_size - MAX_PRINTED))
                return file.read().decode(errors="replace")
        except FileNotFoundError:  # it has just been renamed, and nothing was printed since
            return ""

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
