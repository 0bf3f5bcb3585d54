"""Where results go: those of a full run into ``results/``, which is committed; all others into ``.bench/``."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.contest import ROOT

RESULTS = ROOT / "benchmarks" / "results"
SCRATCH = ROOT / ".bench"
"""Ignored by git."""

NEUTRAL = ("data", "out", "pfl")
"""Options that do not change what is measured."""


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the option ``--out``; ``name`` is what the result is called by default."""
    text = f"where the result goes; default: results/{name}, or .bench/{name} if another option is set"
    parser.add_argument("--out", type=Path, help=text)


def result_path(parser: argparse.ArgumentParser, args: argparse.Namespace, name: str = "") -> Path:
    """Return ``--out`` or, without it, the default place of a result; a quick run never replaces a committed one."""
    if args.out is not None:
        return Path(args.out)
    full = all(value == parser.get_default(key) for key, value in vars(args).items() if key not in NEUTRAL)
    return (RESULTS if full else SCRATCH) / name


def save_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON; a process that is killed meanwhile leaves the former file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON and report where."""
    save_result(path, result)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"result: {shown}", file=sys.stderr)
