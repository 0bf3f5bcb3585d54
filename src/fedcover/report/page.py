"""The page: one self-contained HTML file on one run, or on several compared."""

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.errors import InputError
from fedcover.report import sections, verdict
from fedcover.report.elements import attribute, contents
from fedcover.report.loading import AnyPath, LoadedRun, open_runs
from fedcover.report.methods import group_runs


def write_report(runs: Iterable[LoadedRun | AnyPath], out: str | os.PathLike[str] | None = None) -> Path:
    """Write a self-contained HTML page on one run, or one that compares several; return its path.

    Equal runs give equal bytes.

    Args:
        runs: Runs, or the folders of runs or sweeps.
        out: The file to write; by default ``report.html`` in the folder of a single run or sweep.

    Raises:
        InputError: If a folder does not hold a run, or several runs are compared without ``out``.

    >>> write_report(["runs/wp"])  # doctest: +SKIP
    PosixPath('runs/wp/report.html')
    >>> write_report(["runs/full", "runs/wp"], out="compare.html")  # doctest: +SKIP
    PosixPath('compare.html')
    """
    listed = [runs] if isinstance(runs, LoadedRun | str | os.PathLike) else list(runs)
    loaded = open_runs(listed)
    if out is None and len(listed) == 1 and not isinstance(listed[0], LoadedRun):
        out = Path(listed[0]) / "report.html"
    if out is None:
        if len(loaded) > 1:
            raise InputError(f"a comparison of {len(loaded)} runs needs out, the file to write, such as compare.html")
        out = loaded[0].path / "report.html"
    return write_atomically(out, page(loaded).encode("utf-8", errors="replace"))


def page(runs: Sequence[LoadedRun]) -> str:
    """Return the whole page as HTML."""
    return frame(verdict.title(runs), run_parts(runs))


def run_parts(runs: Sequence[LoadedRun]) -> list[str]:
    """Return the sections of the page on runs, as HTML."""
    methods = group_runs(runs)
    return [
        sections.heading(runs),
        sections.tiles(runs),
        sections.comparison(methods),
        sections.certificates(runs),
        sections.figures(methods),
        sections.traffic(runs),
        sections.rounds(runs),
        sections.settings(methods),
    ]


def frame(title: str, parts: Sequence[str], script: str = "") -> str:
    """Return a page with this title and these parts, which are HTML; ``script`` follows that of all pages."""
    return _document(title, main(parts), package_file("page.js") + script)


def live_frame(title: str, body: str, version: int) -> str:
    """Return a page that replaces its main element when the server has a newer version."""
    return _document(title, body, package_file("page.js") + package_file("live.js"), version)


def _document(title: str, body: str, script: str, version: int | None = None) -> str:
    live = "" if version is None else f' data-version="{version}"'
    policy = _policy(script) + ("" if version is None else "; connect-src 'self'")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{attribute(title)} · fedcover</title>
<style>{package_file("page.css")}</style>
</head>
<body{live}>
{body}
<script>{script}</script>
</body>
</html>
"""


def main(parts: Sequence[str]) -> str:
    """Return the main element of a page: its parts, with the contents before the first section."""
    shown = [part for part in parts if part]
    first = next((number for number, part in enumerate(shown) if part.startswith("<h2")), len(shown))
    body = "\n".join(part for part in (*shown[:first], contents(shown), *shown[first:]) if part)
    return f"<main>\n{body}\n</main>"


def _policy(script: str) -> str:
    """Return the content security policy: this page's own script, styles and embedded images, nothing from outside."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data: blob:"


def package_file(name: str) -> str:
    """Return a text file of this package."""
    return resources.files("fedcover.report").joinpath(name).read_text(encoding="utf-8")
