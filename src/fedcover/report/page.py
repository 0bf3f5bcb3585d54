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
from fedcover.report.loading import AnyPath, LoadedRun, open_runs


def write_report(runs: Iterable[LoadedRun | AnyPath], out: str | os.PathLike[str] | None = None) -> Path:
    """Write a self-contained HTML page on one run, or one that compares several; return its path.

    Equal runs give equal bytes.

    Args:
        runs: Runs, or the folders of runs.
        out: The file to write; by default ``report.html`` in the folder of a single run.

    Raises:
        InputError: If a folder does not hold a run, or several runs are compared without ``out``.

    >>> write_report(["runs/wp"])  # doctest: +SKIP
    PosixPath('runs/wp/report.html')
    >>> write_report(["runs/full", "runs/wp"], out="compare.html")  # doctest: +SKIP
    PosixPath('compare.html')
    """
    loaded = open_runs(runs)
    if out is None:
        if len(loaded) > 1:
            raise InputError(f"a comparison of {len(loaded)} runs needs out, the file to write, such as compare.html")
        out = loaded[0].path / "report.html"
    return write_atomically(out, page(loaded).encode("utf-8", errors="replace"))


def page(runs: Sequence[LoadedRun]) -> str:
    """Return the whole page as HTML."""
    parts = [
        sections.heading(runs),
        sections.tiles(runs),
        sections.comparison(runs) if len(runs) > 1 else "",
        sections.certificates(runs),
        sections.figures(runs),
        sections.traffic(runs),
        sections.rounds(runs),
        sections.settings(runs),
    ]
    return frame(verdict.title(runs), parts)


def frame(title: str, parts: Sequence[str]) -> str:
    """Return a page with this title and these parts, which are HTML."""
    style, script = _package_file("page.css"), _package_file("page.js")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<title>{sections.attribute(title)} · fedcover</title>
<style>{style}</style>
</head>
<body>
<main>
{chr(10).join(part for part in parts if part)}
</main>
<script>{script}</script>
</body>
</html>
"""


def _policy(script: str) -> str:
    """Return the content security policy: this page's own script, styles and embedded images, nothing from outside."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data: blob:"


def _package_file(name: str) -> str:
    return resources.files("fedcover.report").joinpath(name).read_text(encoding="utf-8")
