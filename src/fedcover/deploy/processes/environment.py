"""The environment of every Flower and Ray process that fedcover starts, and where Flower's programs are.

Flower reads these when it is imported, so they are set before Python starts:

    FLWR_HOME                                      Flower's files, in a private folder instead of ~/.flwr
    FLWR_TELEMETRY_ENABLED=0                       no usage events to its makers
    FLWR_DISABLE_UPDATE_CHECK=1                    no question for newer versions
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 nothing is installed when a run starts: what is installed is used
    RAY_USAGE_STATS_ENABLED=0                      no usage events to Ray's makers
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0           Ray leaves the variables of GPUs alone, and does not warn of it
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0            Ray listens on 127.0.0.1 alone, in spite of the name (Ray 2.55)
    PATH                                           the folder of this Python first: Flower starts its programs by name
    PYTHONUNBUFFERED=1                             log lines appear when they are written
    NO_COLOR=1                                     log lines without colour codes, where the program heeds it
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
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def flower_environment(
    home: str | Path, ray_on_network: bool = False, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The environment of a Flower process: this one's, or ``base``, with the variables above.

    >>> flower_environment("/tmp/home", base={"PATH": "/bin"})["FLWR_TELEMETRY_ENABLED"]
    '0'
    """
    found = {**(os.environ if base is None else base), **QUIET, "FLWR_HOME": str(Path(home).absolute())}
    if not ray_on_network:
        found.update(LOOPBACK)
    found["PATH"] = os.pathsep.join([str(_programs()), *filter(None, [found.get("PATH", os.defpath)])])
    return found


def use_flower_environment(home: str | Path, ray_on_network: bool = False) -> None:
    """Set these variables for this process too, as a simulation needs it; before Flower or Ray is imported."""
    os.environ.update(flower_environment(home, ray_on_network))


def program(name: str) -> str:
    """The path of one of Flower's programs, those beside this Python first."""
    path = shutil.which(name, path=str(_programs())) or shutil.which(name)
    if path is None:
        check_extra("flower", "a deployment", "flwr")
        raise InputError(
            f"{name} is neither in {_programs()} nor on the PATH; install it with: pip install 'fedcover[flower]'"
        )
    return path


def _programs() -> Path:
    return Path(sys.executable).parent
