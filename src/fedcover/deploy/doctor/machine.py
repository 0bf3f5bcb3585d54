"""Checks of the machine itself: folders, disk, memory, the clock and the permissions of keys."""

import ctypes
import shutil
import tempfile
from pathlib import Path

from fedcover.deploy.doctor.findings import Finding
from fedcover.errors import InputError

GIB = 1 << 30
LEAST_MEMORY = 1 * GIB
"""Free memory that a server or a node needs at least; torch and a small model take about half of it."""
UNSYNCHRONISED = 5
"""What the kernel answers of a clock that nothing synchronises."""


def check_folder(folder: Path, least: int) -> str:
    """Return a sentence on a folder; raise InputError unless files can be written in it, with ``least`` bytes free."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise InputError(f"{existing} is not a folder; name another")
    free = shutil.disk_usage(existing).free
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = "make room on the disk" if free < least else "name a folder that this user may write to"
        raise InputError(f"{existing} cannot be written ({reason}); {remedy}") from None
    if free < least:
        raise InputError(
            f"the disk of {existing} has {free / GIB:.2f} GiB free, and {least / GIB:.2f} are needed; make room, or"
            f" name a folder on another disk"
        )
    return f"{folder} is writable, with {free / GIB:.1f} GiB free"


def check_secret(path: Path) -> str:
    """Return a sentence on a private key; raise InputError unless only its owner can read it."""
    try:
        mode = path.stat().st_mode & 0o777
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); run this as the user that owns it") from None
    if mode & 0o077:
        raise InputError(f"{path} can be read by others (mode {mode:o}); run: chmod 600 {path}")
    return f"only its owner can read {path.name}"


def check_memory(least: int = LEAST_MEMORY) -> str:
    """Return a sentence on the free memory; raise InputError if it is too little."""
    free = free_memory()
    if free is None:
        return "unknown"
    if free < least:
        raise InputError(
            f"{free / GIB:.1f} GiB of memory are free, and about {least / GIB:.1f} are needed; end other programs, or"
            f" raise the limit of the service"
        )
    return f"{free / GIB:.1f} GiB free"


def free_memory() -> int | None:
    """Return the bytes of memory that are free on this machine and within the limit of this process's group."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return free if limit == "max" else min(free, max(int(limit) - int(used), 0))
    except (OSError, ValueError):
        return free


def clock_finding() -> Finding:
    """Return whether the kernel's clock is synchronised with the time of the network."""
    subject = "clock"
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zero: it only asks
    except (OSError, AttributeError):
        state = -1
    if state == UNSYNCHRONISED:
        return Finding(
            "warning",
            subject,
            "nothing synchronises this machine's clock; run a time service, such as `timedatectl set-ntp true`",
        )
    return Finding("ok", subject, "synchronised" if state >= 0 else "the kernel does not say how it is set")
