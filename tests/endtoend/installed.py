"""The wheel, installed where only the packages that its metadata asks for can be imported."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE")

FEDCOVER = """
import contextlib, io, json
from importlib.metadata import entry_points
(program,) = entry_points(group="console_scripts", name="fedcover")
for arguments in {commands}:
    sys.argv, out, err = ["fedcover", *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = program.load()()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]))
"""
"""Calls the program that the wheel installs, once for each command."""


def build(folder: Path) -> tuple[Path, Path]:
    """Return the sdist and the wheel, built from a copy of the sources, so that the checkout stays as it is."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def install(wheel: Path, folder: Path) -> None:
    """Install a wheel into a folder, without what it depends on."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, timeout=240)


class Installed:
    """An installed package, beside links to what it and some of its extras depend on.

    Args:
        package: The folder into which the wheel is installed.
        extras: The extras whose packages can be imported.
        folder: An empty folder to work in.
    """

    def __init__(self, package: Path, extras: Iterable[str], folder: Path) -> None:
        self.package, self.folder, self.packages = package, folder, folder / "packages"
        self.packages.mkdir()
        (info,) = package.glob("*.dist-info")
        self._seen: set[tuple[str, str]] = set()
        self._link_needs(PathDistribution(info), ("", *extras))

    def python(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a script that sees the standard library, the package and its dependencies, and nothing else."""
        paths = [str(self.package), str(self.packages)]
        command = [sys.executable, "-I", "-S", "-c", f"import sys\nsys.path[:0] = {paths}\n{script}"]
        environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
        return subprocess.run(command, capture_output=True, text=True, cwd=self.folder, env=environment, timeout=240)

    def fedcover(self, *commands: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
        """Run the command that the wheel installs with several lists of arguments, all in one process."""
        done = self.python(FEDCOVER.format(commands=[list(command) for command in commands]))
        results = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(results) == len(commands), done.stdout + done.stderr
        return [subprocess.CompletedProcess(c, *result) for c, result in zip(commands, results, strict=True)]

    def _link_needs(self, package: Distribution, extras: Iterable[str]) -> None:
        for extra in extras:
            key = (canonicalize_name(package.metadata["Name"]), extra)
            if key in self._seen:
                continue
            self._seen.add(key)
            for line in package.requires or []:
                need = Requirement(line)
                if need.marker is not None and not need.marker.evaluate({"extra": extra}):
                    continue
                if need.marker is None and extra:
                    continue  # belongs to no extra
                other = package if canonicalize_name(need.name) == key[0] else distribution(need.name)
                if other is not package:
                    self._link(other)
                self._link_needs(other, ("", *sorted(need.extras)))

    def _link(self, package: Distribution) -> None:
        tops = {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            link = self.packages / top
            if not link.exists():
                link.symlink_to(Path(str(package.locate_file(top))).resolve())
