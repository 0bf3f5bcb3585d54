"""What tests of documents share: which files there are, the blocks in them, and the tools that build the site."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools" / "docs"
REPORTS = (ROOT / "docs" / "paper", ROOT / "docs" / "study")
"""Folders whose documents are written by commands."""
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent not in REPORTS]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), ROOT / "benchmarks" / "README.md", *PAGES]


def name_of(path: Path) -> str:
    """Return a document's path in the repository."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def tool(name: str) -> ModuleType:
    """Return a module of ``tools/docs``; they import each other by these names."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return importlib.import_module(name)
