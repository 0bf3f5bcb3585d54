"""A small parent process for one Flower program; it ends the program and all that it started.

Run as a script, with only the standard library: ``supervisor.py PARENT LOG LIMIT -- COMMAND...``. Flower's programs
start others in their own sessions and sometimes leave some behind. On Linux the supervisor adopts every descendant that
loses its parent, so that it can find all of them; elsewhere it finds those whose parents still run. It ends the
program, then the rest, when

    the program has ended         and exits with its code, or 128 + the signal that ended it
    the parent has ended          even by SIGKILL: a process whose parent ends gets another parent
    it receives SIGTERM           as `ChildProcess.close` sends it

If the supervisor itself is killed, Linux sends SIGTERM to the program. Output is appended to LOG, without colour codes
and without the lines that a server prints for every request. At LIMIT bytes the file is renamed to LOG.1.
"""

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import FrameType

GRACE = 6.0
"""Seconds that a program has to end after SIGTERM, before SIGKILL; half of that for processes it left behind."""
TICK = 0.1
EMPTY_SCANS = 2
"""How many scans in a row must find no process: a scan is not atomic, and a process may change parents during it."""
COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
ROUTINE = re.compile(
    rb'^(?:\S+Z )?(?:INFO|DEBUG)\b(?:.*"[A-Z]+ \S+ HTTP/[\d.]+" 2\d\d\b|\s*:?\s+(?:\[[\w.]+\] )?ControlServicer\.)'
)
"""Lines about a request that succeeded: months of them are of no use."""
MAX_LINE = 1 << 16
"""Bytes after which a line is written before it is complete."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, log: "LogFile", command: list[str]) -> int:
    """Run a command until it ends or must end, and return its exit code."""
    signals: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )  # fmt: skip
    os.close(writer)
    output, codes = OutputForwarder(reader, log), ExitCodes()
    try:
        while child.pid not in codes and not signals and os.getppid() == parent:
            output.forward(TICK)
            codes.collect()
    finally:
        end_processes([child.pid], GRACE, output, codes)
        end_processes([], GRACE / 2, output, codes)
    output.forward(0)
    code = codes.get(child.pid, 1)
    child.returncode = code  # collected above; Popen must not wait for it
    return code


class ExitCodes(dict[int, int]):
    """The exit codes of children that have ended, including adopted ones."""

    def collect(self) -> None:
        """Add the codes of children that have ended by now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self[pid] = code if code >= 0 else 128 - code


class LogFile:
    """A file for lines of output. At a size limit it is renamed to ``FILE.1``, and a new one is begun.

    Args:
        path: The file.
        limit: The size limit in bytes.
    """

    def __init__(self, path: str, limit: int) -> None:
        self._path, self._limit = path, limit

    def write(self, lines: list[bytes]) -> None:
        """Append lines; a full disk costs output, and ends no program."""
        with suppress(OSError):
            with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.write(b"".join(line + b"\n" for line in lines))
                file.flush()
                full = file.tell() >= self._limit
            if full:
                os.replace(self._path, f"{self._path}.1")


class OutputForwarder:
    """The output of the processes, forwarded to a file line by line."""

    def __init__(self, source: int, log: LogFile) -> None:
        self._source, self._log, self._partial, self._open = source, log, b"", True

    def forward(self, seconds: float) -> None:
        """Wait at most so long for output, and forward what has arrived."""
        if not self._open:
            time.sleep(seconds)
            return
        if not select.select([self._source], [], [], seconds)[0]:
            return
        data = os.read(self._source, 1 << 16)
        self._open = bool(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        if self._partial and (not data or len(self._partial) > MAX_LINE):
            lines, self._partial = [*lines, self._partial], b""
        plain = [COLOURS.sub(b"", line.rstrip()) for line in lines]
        if useful := [line for line in plain if not ROUTINE.search(line)]:
            self._log.write(useful)


def end_processes(pids: list[int], grace: float, output: OutputForwarder, codes: ExitCodes) -> None:
    """End these processes, or all descendants if none are named: by SIGTERM, then by SIGKILL."""
    for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 2.0)):
        until, empty_scans = time.monotonic() + seconds, 0
        signalled: set[int] = set()
        while time.monotonic() < until:
            codes.collect()
            left = [pid for pid in pids if pid not in codes] if pids else descendants(os.getpid())
            empty_scans = 0 if left else empty_scans + 1
            if (pids and not left) or empty_scans == EMPTY_SCANS:
                return
            for pid in set(left) - signalled:
                signalled.add(pid)
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, number)
            output.forward(TICK)


def descendants(root: int) -> list[int]:
    """Return all processes that descend from one and have not ended."""
    parents, ended = process_table()
    pids: set[int] = set()
    generation = {root}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation and pid not in pids}
        pids |= generation
    return sorted(pids - ended)


def process_table() -> tuple[dict[int, int], set[int]]:
    """Return the parent of every process, and the zombies, which still count as parents of their children."""
    if not os.path.isdir("/proc/self"):
        return _table_from_ps()
    parents, ended = {}, set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has just ended
            parents[int(entry)] = int(parent)
            if state == b"Z":
                ended.add(int(entry))
    return parents, ended


def _table_from_ps() -> tuple[dict[int, int], set[int]]:
    parents, ended = {}, set()
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False)
    for pid, parent, state in (line.split()[:3] for line in listing.stdout.splitlines()):
        parents[int(pid)] = int(parent)
        if state.startswith("Z"):
            ended.add(int(pid))
    return parents, ended


def prctl(option: int, value: int) -> None:
    """Set a Linux attribute of this process; do nothing on other systems."""
    if LIBC is not None:
        LIBC.prctl(option, value, 0, 0, 0)


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), LogFile(sys.argv[2], int(sys.argv[3])), sys.argv[5:]))
