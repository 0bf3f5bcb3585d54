"""The documentation site for tests: built once for all of them, and read as a reader's browser does."""

import fcntl
import os
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.endtoend.documents import ROOT

SOURCES = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}
"""The attribute of each element that names a file which a browser loads."""
MISSING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]


def require() -> None:
    """Skip the test where the generator is not installed; with FEDCOVER_BROWSER=require, fail."""
    if not MISSING:
        return
    sentence = f"the site is not built: {', '.join(MISSING)} not installed; use pip install 'fedcover[docs]'"
    if os.environ.get("FEDCOVER_BROWSER") == "require":
        pytest.fail(sentence)
    pytest.skip(sentence)


def build(folder: Path) -> Path:
    """Build the site below a folder, unless another process of the same session has done so; return where it is."""
    site, log = folder / "site", folder / "site.log"
    with (folder / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log.exists():
            path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
                capture_output=True,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"},
                timeout=240,
            )
            log.write_text(done.stderr + ("" if done.returncode == 0 else "\nFAILED"))
    return site


def log_of(site: Path) -> str:
    """Return what the build printed; it ends in FAILED if it failed."""
    return (site.parent / "site.log").read_text()


class PageParser(HTMLParser):
    """Collects the links of a page's text and tabs, and the files that a browser loads for it."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a link or a file."""
        values = dict(attrs)
        if tag == "article" or (tag == "nav" and "md-tabs" in (values.get("class") or "")):
            self._open.append(tag)
        if tag == "a" and self._open and values.get("href"):
            self.links.append(str(values["href"]))
        if values.get("rel") not in ("canonical", "prev", "next") and (file := values.get(SOURCES.get(tag, ""))):
            self.loads.append(file)

    def handle_endtag(self, tag: str) -> None:
        """Note the end of the text or the tabs."""
        if self._open and tag == self._open[-1]:
            self._open.pop()


def parse(page: Path) -> PageParser:
    """Return what a page links to and loads."""
    parser = PageParser()
    parser.feed(page.read_text())
    return parser


def linked_pages(page: Path) -> set[Path]:
    """Return the pages that can be reached by one click on a link in the text or the tabs of a page."""
    targets = {urlsplit(link) for link in parse(page).links}
    paths = {page.parent / unquote(target.path) for target in targets if target.path and not target.scheme}
    return {Path(os.path.normpath(path)) for path in paths if path.suffix == ".html"}


def pages(site: Path) -> list[Path]:
    """Return all pages of the site that readers should find."""
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def clicks(site: Path) -> dict[Path, int]:
    """Return how many clicks from the first page each page takes; those that cannot be reached are left out."""
    depth = {site / "index.html": 0}
    border = set(depth)
    while border:
        border = {target for page in border for target in linked_pages(page) if target.exists()} - depth.keys()
        steps = 1 + max(depth.values())
        depth |= dict.fromkeys(border, steps)
    return depth
