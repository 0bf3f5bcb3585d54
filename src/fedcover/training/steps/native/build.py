"""The C library, which is compiled for this machine at first use and cached in the user's cache folder."""

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
HEADERS = tuple(sorted(SOURCE.parent.glob("*.h")))
# Contraction to fused multiply-adds is requested explicitly, since the defaults of compilers differ.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-ffp-contract=fast", "-fPIC", "-shared")
OFF = "FEDCOVER_NATIVE"
"""The environment variable that disables the library if it is 0."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None if it is disabled, or if it cannot be compiled or loaded."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=60).stdout
        ingredients = (
            *(path.read_bytes() for path in (SOURCE, *HEADERS)),
            " ".join([*compiler, *FLAGS]).encode(),
            version,
            _processor(),
        )
        digest = hashlib.sha256(b"|".join(ingredients)).hexdigest()[:32]
        path = cache_folder() / "native" / f"chain-{digest}.so"
        if not path.exists():
            _compile(compiler, path)
        return _declared(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def _compile(compiler: list[str], path: Path) -> None:
    """Compile the library; several processes may do so at once, since the file is moved into place atomically."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        command = [*compiler, *FLAGS, "-o", str(draft), str(SOURCE), "-lm"]
        subprocess.run(command, capture_output=True, check=True, timeout=300)
        os.replace(draft, path)


def _processor() -> bytes:
    """Return what code for this processor depends on: its name and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"model name", b"flags", b"Features"))}))


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument and result types of the library's functions."""
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for function in (library.fedcover_chain_size, library.fedcover_chain_epoch):
        function.argtypes = [pointer, number, pointer]
    library.fedcover_chain_size.restype = number
    library.fedcover_chain_epoch.restype = ctypes.c_int
    return library
