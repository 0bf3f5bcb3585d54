"""Facts about the machine and the software, without names of hosts or users."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def facts() -> dict[str, Any]:
    """Return cores, processor, memory and versions."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("fedcover", "torch", "numpy")},
    }


def load() -> float:
    """Return the average number of processes that needed a core over the last minute."""
    return round(os.getloadavg()[0], 2)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
