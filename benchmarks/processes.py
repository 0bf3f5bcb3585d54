"""A process with all its descendants: their memory, and their end."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def descend(pid: int) -> list[int]:
    """A process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    found, at = [pid], 0
    while at < len(found):
        found += children.get(found[at], [])
        at += 1
    return found


def peak_mb(pid: int) -> float:
    """The sum of each process's own peak of resident memory; pages that they share count in each."""
    return sum(_field(one, "status", "VmHWM:") for one in descend(pid)) / 1024


def proportional_mb(pid: int) -> float:
    """Resident memory now, pages that processes share counted once."""
    return sum(_field(one, "smaps_rollup", "Pss:") for one in descend(pid)) / 1024


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its descendants have used, in ticks of 10 ms."""
    total = 0
    for one in descend(pid):
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def started(pid: int) -> str:
    """When a process began, in clock ticks; with its id this names it for good. Empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    after = text.rpartition(")")[2].split()
    return "" if after[0] == "Z" else after[19]


def end(known: dict[int, str], patience: float = 10.0) -> list[int]:
    """The ids that did not go by themselves in time and had to be ended; ``known`` has each one's start."""
    forced = []
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 3.0)):
        deadline = time.monotonic() + wait
        while (alive := [pid for pid, start in known.items() if start and started(pid) == start]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        for pid in alive:
            forced.append(pid)
            os.kill(pid, number)
    return forced


def _parents() -> Iterator[tuple[int, int]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            yield int(folder.name), int(stat.rpartition(")")[2].split()[1])


def _field(pid: int, file: str, name: str) -> float:
    """A field of /proc in kB; 0 for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)
