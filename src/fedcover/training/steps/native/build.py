"""The C library, compiled at first use for this very machine, and kept in the user's cache."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from pathlib import Path

from fedcover.data import cache_folder

SOURCE = Path(__file__).with_name("chain.c")
# Contraction to fused multiply-adds is asked for by name, since compilers differ in what they take for granted.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared")
OFF = "FEDCOVER_NATIVE"
"""The environment variable that, set to 0, leaves all steps to torch."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library; None if it is switched off, or if there is no compiler that can make it."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        made = (SOURCE.read_bytes(), " ".join([*compiler, *FLAGS]).encode(), version, _processor())
        path = cache_folder() / "native" / f"chain-{hashlib.sha256(b'|'.join(made)).hexdigest()[:32]}.so"
        if not path.exists():
            _compile(compiler, path)
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def _compile(compiler: list[str], path: Path) -> None:
    """Make the library; two processes may both do so, since the file appears in one step."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        command = [*compiler, *FLAGS, "-o", str(draft), str(SOURCE), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=300)
        os.replace(draft, path)


def _processor() -> bytes:
    """What code made for this processor depends on: its name and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.fedcover_chain_size.argtypes, library.fedcover_chain_size.restype = [pointer, number, number], number
    library.fedcover_chain_epoch.argtypes = [pointer, number, pointer]
    library.fedcover_chain_epoch.restype = ctypes.c_int
    return library
