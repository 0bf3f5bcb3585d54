"""What the benchmarks on a GPU share: options, empty caches for compilers, and a result that is written row by row."""

import argparse
import atexit
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.output import NEUTRAL, add_out, result_path, save_result

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
"""The variables that name the folders in which compilers keep their results."""


def gpu_parser(module: str, description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark on a GPU; ``name`` is what the result is called."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    add_out(parser, name)
    parser.add_argument("--device", default="cuda", help="where to train; 'cpu' only tests the script")
    parser.add_argument("--caches", choices=("cold", "warm"), default="cold", help="cold: new folders for compilers")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which show only that the script works")
    return parser


def cache_folders(parent: Path) -> dict[str, str]:
    """Return the environment in which compilers keep their results below a folder."""
    return {variable: str(parent / variable.lower()) for variable in CACHES}


def synchronize(device: str) -> None:
    """Wait until a GPU has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def device_name(device: str) -> str:
    """Return the name of a GPU, or the kind of another device."""
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else device


def mean_and_spread(values: list[float]) -> dict[str, Any]:
    """Return the number, mean and sample standard deviation of values; of one value, the latter is None."""
    spread = round(statistics.stdev(values), 5) if len(values) > 1 else None
    return {"count": len(values), "mean": round(statistics.fmean(values), 5), "std": spread}


class Report:
    """A result that is on disk after every row, so that a benchmark that is stopped keeps what it measured.

    Args:
        parser: The parser, whose defaults tell which options the recorded command needs.
        args: The options. Cold caches are set up here, before anything is compiled.
        name: What the result is called by default.
        facts: Further entries of the result.
    """

    def __init__(self, parser: argparse.ArgumentParser, args: argparse.Namespace, name: str, **facts: Any) -> None:
        if args.caches == "cold":
            folder = tempfile.mkdtemp()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            os.environ.update(cache_folders(Path(folder)))
        self.path = result_path(parser, args, name)
        self.result: dict[str, Any] = {
            "command": command_of(parser, args),
            "device": device_name(args.device),
            "torch": torch.__version__,
            "caches": "cold: new folders for Triton, Inductor and CUDA" if args.caches == "cold" else "warm",
            **facts,
        }
        self.save()

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Add a row to a part of the result, print it without its tables, and write the result."""
        self.result.setdefault(part, []).append(row)
        shown = {key: value for key, value in row.items() if not isinstance(value, dict) or len(value) < 8}
        print(f"{part}: {shown}", flush=True)
        self.save()

    def measure(self, part: str, label: str, work: Callable[[], dict[str, Any]]) -> None:
        """Add the row that a function returns; an error becomes a row, so that later rows are still measured."""
        print(f"{part}: {label} begins", flush=True)
        start = time.perf_counter()
        try:
            row = work()
        except Exception as error:
            row = {"what": label, "error": f"{type(error).__name__}: {error}"[:500]}
            traceback.print_exc()
        self.add(part, {**row, "seconds_in_all": round(time.perf_counter() - start, 1)})

    def put(self, key: str, value: Any) -> None:
        """Set an entry of the result, and write it."""
        self.result[key] = value
        self.save()

    def save(self) -> None:
        """Write the result."""
        save_result(self.path, self.result)


def command_of(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the command with the options that differ from their defaults, without names of folders."""
    words = [f"PYTHONPATH=src {parser.prog}"]
    for key, value in vars(args).items():
        if key in NEUTRAL or value == parser.get_default(key):
            continue
        words.append("--" + key.replace("_", "-"))
        if not isinstance(value, bool):
            words += map(str, value) if isinstance(value, list) else [str(value)]
    return " ".join(words)
