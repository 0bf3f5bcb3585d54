"""The environment of every Flower and Ray process that fedcover starts, and the location of Flower's programs.

Flower reads these variables when it is imported, so they are set before Python starts:

    FLWR_HOME                                      Flower's files, in a private folder instead of ~/.flwr
    FLWR_TELEMETRY_ENABLED=0                       no usage events to Flower's developers
    FLWR_DISABLE_UPDATE_CHECK=1                    no check for newer versions
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 no installation of packages when a run starts
    RAY_USAGE_STATS_ENABLED=0                      no usage events to Ray's developers
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0           Ray does not change the variables of GPUs, and does not warn of it
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0            Ray listens only on 127.0.0.1, despite the name (Ray 2.55)
    PATH                                           the folder of this Python first: Flower starts its programs by name
    PYTHONUNBUFFERED=1                             log lines appear when they are written
    NO_COLOR=1                                     log lines without colour codes, where the program supports it
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from fedcover.errors import InputError, check_extra

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",
}
SERVER = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""For the server's processes with glibc: memory of large messages goes back to the system as soon as it is free."""
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def flower_environment(
    home: str | Path, ray_on_network: bool = False, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a Flower process.

    Args:
        home: The folder for Flower's files.
        ray_on_network: Whether Ray may listen on the network; by default it listens only on loopback.
        base: The variables to start from; those of this process by default.

    >>> flower_environment("/tmp/home", base={"PATH": "/bin"})["FLWR_TELEMETRY_ENABLED"]
    '0'
    """
    environment = {**(os.environ if base is None else base), **QUIET, "FLWR_HOME": str(Path(home).absolute())}
    if not ray_on_network:
        environment.update(LOOPBACK)
    path = environment.get("PATH", os.defpath)
    environment["PATH"] = os.pathsep.join([str(_program_folder()), *filter(None, [path])])
    return environment


def find_program(name: str) -> str:
    """Return the path of one of Flower's programs, preferring those next to this Python."""
    path = shutil.which(name, path=str(_program_folder())) or shutil.which(name)
    if path is None:
        check_extra("flower", "a deployment", "flwr")
        raise InputError(
            f"{name} is neither in {_program_folder()} nor on the PATH; install it with: pip install 'fedcover[flower]'"
        )
    return path


def _program_folder() -> Path:
    return Path(sys.executable).parent
