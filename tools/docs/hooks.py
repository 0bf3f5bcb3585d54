"""Hooks of mkdocs: generated pages, links to the rest of the repository, and marks that only authors need.

Nothing of this is imported by the library. ``mkdocs.yml`` names this file.
"""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from command_line import command_line
from fill_numbers import without_marks
from fill_tables import GENERATED
from reference import PARTS, page_of, room_page, rooms
from repository import PAGES, ROOT, copied_files, for_site, site_path

TITLES = {"CONTRIBUTING.md": "Contributing", "CHANGELOG.md": "Changelog", "SECURITY.md": "Security"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages that are not written by hand to the navigation."""
    nav: Any = config.nav
    sections = {title: pages for entry in nav for title, pages in entry.items()}
    sections["Reference"].append({"Python API": [{room: page_of(room)} for room in rooms()]})
    sections["Project"] += [{title: PAGES[name]} for name, title in TITLES.items() if (ROOT / name).exists()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, the repository's own pages, and copies of the files that pages link to."""
    for room, modules in rooms().items():
        files.append(File.generated(config, page_of(room), content=room_page(room, modules)))
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None and (ROOT / source).exists():
            texts[source] = (ROOT / source).read_text()
            files.append(File.generated(config, page, content=for_site(texts[source], source)))
    wanted = {path for source, text in texts.items() for path in copied_files(text, source)}
    for path in sorted(wanted):
        files.append(File.generated(config, site_path(path), content=(ROOT / path).read_bytes()))
    return files


def project_links() -> str:
    """Return links to those of the repository's own documents that exist."""
    lines = [f"- [{title}]({Path(PAGES[name]).name})" for name, title in TITLES.items() if (ROOT / name).exists()]
    return "\n" + "\n".join(lines)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in generated parts, take out the marks of numbers, and point links at the site."""
    makers = {**PARTS, "command-line": command_line, "project": project_links}
    text = GENERATED.sub(lambda match: makers[match[1]](), without_marks(markdown))
    return for_site(text, f"docs/{page.file.src_uri}")
