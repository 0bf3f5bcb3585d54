"""Memory, processor time and termination of a process with all its descendants."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path


def descend(pid: int) -> list[int]:
    """Return the ids of a process and its descendants, parents first."""
    children: dict[int, list[int]] = {}
    for child, parent in _parents():
        children.setdefault(parent, []).append(child)
    family, at = [pid], 0
    while at < len(family):
        family += children.get(family[at], [])
        at += 1
    return family


def peak_mb(pid: int) -> float:
    """Return the sum of the peaks of resident memory; shared pages count in every process."""
    return sum(_field(member, "status", "VmHWM:") for member in descend(pid)) / 1024


def proportional_mb(pid: int) -> float:
    """Return the current resident memory; shared pages count once."""
    return sum(_field(member, "smaps_rollup", "Pss:") for member in descend(pid)) / 1024


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and its descendants, to 10 ms."""
    total = 0
    for member in descend(pid):
        with contextlib.suppress(OSError):
            total += sum(map(int, Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return total / os.sysconf("SC_CLK_TCK")


def started(pid: int) -> str:
    """Return the start of a process in clock ticks, which with its id identifies it; empty if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    after = text.rpartition(")")[2].split()
    return "" if after[0] == "Z" else after[19]


def end(starts: dict[int, str], patience: float = 10.0) -> list[int]:
    """End processes that do not end by themselves in time, and return their ids.

    Args:
        starts: The start of each process by id, as ``started`` returned it.
        patience: Seconds to wait before a process is terminated.
    """
    forced = []
    for number, wait in ((signal.SIGTERM, patience), (signal.SIGKILL, 3.0)):
        deadline = time.monotonic() + wait
        while (alive := [pid for pid, start in starts.items() if start and started(pid) == start]) and (
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
    """Return a field of /proc in kB; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) for line in lines if line.startswith(name)), 0.0)
