"""A small parent for one Flower program that ends with it, with its starter or by a signal, and leaves nothing behind.

Run as a script of its own, with the standard library alone: ``supervisor.py STARTER -- COMMAND...``. Flower's programs
start others in sessions of their own and now and then leave some behind. On Linux the warden adopts every process below
it that loses its parent, so all of them can be found; elsewhere it finds those whose parents live. It ends the program,
then the rest, when

    the program has ended         and exits with its code, or 128 + the signal that ended it
    the starter has ended         even by SIGKILL: a process whose parent ends gets another
    it gets SIGTERM               as `Program.close` sends it

If the warden itself is killed, Linux sends the program SIGTERM. Lines are passed on without colour codes.
"""

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from types import FrameType

PATIENCE = 6.0
"""Seconds that a program has to end after SIGTERM, before SIGKILL; half of that for those it left behind."""
TICK = 0.1
LOOKS = 2
"""How often in a row nothing must be seen below: a look is no snapshot, and a process may change parents during it."""
COLOURS = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(starter: int, command: list[str]) -> int:
    """Run a command until it ends or is to end; its exit code."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )  # fmt: skip
    os.close(writer)
    lines, codes = Lines(reader), Codes()
    while child.pid not in codes and not asked and os.getppid() == starter:
        lines.pass_on(TICK)
        codes.collect()
    end([child.pid], PATIENCE, lines, codes)
    end([], PATIENCE / 2, lines, codes)
    lines.pass_on(0)
    code = codes.get(child.pid, 1)
    child.returncode = code  # collected above; Popen must not wait for it
    return code


class Codes(dict[int, int]):
    """The exit codes of children that ended, adopted ones too."""

    def collect(self) -> None:
        """Take note of those that ended by now."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            self[pid] = code if code >= 0 else 128 - code


class Lines:
    """What the processes print, passed on line by line."""

    def __init__(self, source: int) -> None:
        self._source, self._rest, self._open = source, b"", True

    def pass_on(self, seconds: float) -> None:
        """Wait so long for output, and pass on what is there."""
        if not self._open:
            time.sleep(seconds)
            return
        if not select.select([self._source], [], [], seconds)[0]:
            return
        data = os.read(self._source, 1 << 16)
        self._open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            sys.stdout.buffer.write(COLOURS.sub(b"", line.rstrip()) + b"\n")
        sys.stdout.buffer.flush()


def end(pids: list[int], patience: float, lines: Lines, codes: Codes) -> None:
    """End these processes, or all below this one if none are named: SIGTERM, and in the end SIGKILL."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 2.0)):
        until, empty = time.monotonic() + seconds, 0
        told: set[int] = set()
        while time.monotonic() < until:
            codes.collect()
            left = [pid for pid in pids or below(os.getpid()) if pid not in codes]
            empty = 0 if left else empty + 1
            if (pids and not left) or empty == LOOKS:
                return
            for pid in set(left) - told:
                told.add(pid)
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    codes.setdefault(pid, 1)
            lines.pass_on(TICK)


def below(root: int) -> list[int]:
    """All processes that descend from one and have not ended."""
    parents, ended = parents_of_all()
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new and pid not in found}
        found |= new
    return sorted(found - ended)


def parents_of_all() -> tuple[dict[int, int], set[int]]:
    """The parent of every process; and those that ended but were not collected, whose children may still have them."""
    found, ended = {}, set()
    if not os.path.isdir("/proc/self"):
        listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False)
        for pid, above, how in (line.split()[:3] for line in listing.stdout.splitlines()):
            found[int(pid)] = int(above)
            if how.startswith("Z"):
                ended.add(int(pid))
        return found, ended
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # it has just ended
            found[int(entry)] = int(parent)
            if state == b"Z":
                ended.add(int(entry))
    return found, ended


def prctl(option: int, value: int) -> None:
    """Tell Linux something about this process; nothing on another system."""
    if LIBC is not None:
        LIBC.prctl(option, value, 0, 0, 0)


LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[3:]))
