"""Connect the site with the rest of the repository.

Markdown files link to one another by paths that work on the repository's own pages. Inside the site two cases differ:
some files outside ``docs/`` are pages of the site, and any other file that a page links to is copied into it.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
COPIES = "files"
"""Folder of the site that holds copies of files outside ``docs/``."""
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "results/benchmarks.md",
    "benchmarks/results/cpu.md": "results/cpu.md",
    "docs/paper/README.md": "paper/report.md",
}
"""Files that are pages of the site at another path, below ``docs/``. ``paper/index.html`` is a file of its own."""
SHOWN_BY_BROWSERS = {".json", ".svg", ".png", ".html", ".txt"}
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
WHOLE_LINK = re.compile(r"\[([^\[\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)


def outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a Markdown text in order, each with whether it is prose (True) or a fenced block (False)."""
    end = 0
    for fence in FENCE.finditer(text):
        yield text[end : fence.start()], True
        yield fence.group(), False
        end = fence.end()
    yield text[end:], True


def links(text: str) -> list[str]:
    """Return the targets of the relative links in a Markdown text, with their anchors."""
    prose = "".join(part for part, is_prose in outside_fences(text) if is_prose)
    return [target for _, target, _ in LINK.findall(prose) if is_relative(target)]


def is_relative(target: str) -> bool:
    """Return whether a link's target is a path relative to the file with the link."""
    return not re.match(r"[a-z]+:|#|/|<", target)


def resolve(target: str, source: str) -> str:
    """Return the path in the repository that a link in the file ``source`` leads to, without its anchor.

    >>> resolve("../README.md#install", "docs/index.md")
    'README.md'
    """
    path = target.partition("#")[0]
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source


def site_path(path: str) -> str:
    """Return the path below ``docs/`` at which the site has a file of the repository.

    >>> site_path("docs/index.md"), site_path("CHANGELOG.md"), site_path("src/fedcover/params.py")
    ('index.md', 'project/changelog.md', 'files/src/fedcover/params.py.txt')
    """
    if path in PAGES:
        return PAGES[path]
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    suffix = "" if PurePosixPath(path).suffix in SHOWN_BY_BROWSERS else ".txt"
    return f"{COPIES}/{path}{suffix}"


def for_site(text: str, source: str) -> str:
    """Return a Markdown text whose relative links are those of the site; ``source`` is its path in the repository.

    Of a link to a folder only the text stays, since the site has no page for it.
    """
    folder = posixpath.dirname(site_path(source))

    def without_folder(match: re.Match[str]) -> str:
        words, target = match.groups()
        return words if is_relative(target) and (ROOT / resolve(target, source)).is_dir() else match.group()

    def rewritten(match: re.Match[str]) -> str:
        opening, target, closing = match.groups()
        path = resolve(target, source) if is_relative(target) else ""
        if not (ROOT / path).is_file():  # mkdocs reports it, unless it is a page that is generated
            return match.group()
        anchor = target.partition("#")[1:]
        return f"{opening}{posixpath.relpath(site_path(path), folder or '.')}{''.join(anchor)}{closing}"

    def changed(part: str) -> str:
        return LINK.sub(rewritten, WHOLE_LINK.sub(without_folder, part))

    return "".join(changed(part) if prose else part for part, prose in outside_fences(text))


def copied_files(text: str, source: str) -> set[str]:
    """Return the files outside ``docs/`` that a Markdown file links to and that are not pages of the site."""
    paths = {resolve(target, source) for target in links(text)}
    return {path for path in paths if not path.startswith(f"{DOCS}/") and path not in PAGES and (ROOT / path).is_file()}
