"""Write the tables of the reference pages into the pages themselves, so that they can be read without the site.

A table is between ``<!-- generated: NAME -->`` and ``<!-- /generated -->``; ``NAMES`` lists those that are written.
``python tools/docs/fill_tables.py`` fills every page in place; with ``--check`` it reports pages that would change.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from command_line import command_line
from reference import PARTS
from repository import ROOT

END = "<!-- /generated -->"
GENERATED = re.compile(rf"<!-- generated: ([\w-]+) -->(?:\n(?:(?!<!-- generated: ).)*?{END})?", re.DOTALL)
"""A generated part of a page, with its content if that is written into the page."""
TABLES: dict[str, Callable[[], str]] = {
    **{name: make for name, make in PARTS.items() if name != "rooms"},
    "command-line": command_line,
}
"""The parts that are written into pages; others link to pages that only the site has."""


def filled(text: str) -> str:
    """Return a page with its tables as they are now."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- generated: {name} -->\n\n{TABLES[name]().strip()}\n\n{END}" if name in TABLES else match[0]

    return GENERATED.sub(fill, text)


def stale(write: bool) -> list[str]:
    """Return the pages whose tables are not those of the package; with ``write`` fix them."""
    names = []
    for path in sorted((ROOT / "docs").rglob("*.md")):
        before = path.read_text()
        if "<!-- generated: " in before and (after := filled(before)) != before:
            names.append(str(path.relative_to(ROOT)))
            if write:
                path.write_text(after)
    return names


def main() -> None:
    """Fill or check all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    arguments = parser.parse_args()
    names = stale(write=not arguments.check)
    print("\n".join(names) if names else "all tables are those of the package")
    sys.exit(1 if names and arguments.check else 0)


if __name__ == "__main__":
    main()
