"""The documentation site: it builds without warnings, everything is two clicks away, and it looks right offline."""

import re
import time
from pathlib import Path

import pytest

from tests.endtoend.browser import NARROW, WIDE, Browser
from tests.endtoend.documents import PAGES, tool
from tests.endtoend.site import build, clicks, linked_pages, log_of, pages, parse, require

SCROLL = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
OUTSIDE = """
const limit = document.documentElement.clientWidth + 1;
const scrolls = (element) => element.localName !== "article"
  && (/auto|scroll|hidden/.test(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
return [...document.querySelectorAll("article *")]
  .filter((e) => e.getBoundingClientRect().right > limit && e.checkVisibility() && !scrolls(e.parentElement))
  .map((e) => `<${e.localName}> ${e.textContent.slice(0, 40)}`).slice(0, 3)
"""
LOADED = "return performance.getEntriesByType('resource').map((entry) => entry.name)"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The site, built once for all processes of the session."""
    require()
    own = tmp_path_factory.getbasetemp()
    return build(own.parent if hasattr(request.config, "workerinput") else own)


def test_it_builds_without_warnings(site: Path) -> None:
    assert "WARNING" not in log_of(site)
    assert not log_of(site).endswith("FAILED"), log_of(site)


def test_every_page_is_at_most_two_clicks_from_the_first(site: Path) -> None:
    depth = clicks(site)
    far = {str(page.relative_to(site)): depth.get(page) for page in pages(site) if depth.get(page, 3) > 2}
    assert not far
    assert len(depth) > len(PAGES)


def test_every_room_has_a_page_and_every_public_name_is_in_the_reference(site: Path) -> None:
    reference = tool("reference")
    for room, modules in reference.rooms().items():
        page = (site / "reference" / "api" / f"{room}.html").read_text()
        for module in modules:
            assert f'id="{module}"' in page
    index = (site / "reference" / "api" / "fedcover.html").read_text()
    for name in ("Federation", "Policy", "TrainingOptions", "ModelStructure", "run_many"):
        assert re.search(rf'href="[^"]*#fedcover[\w.]*\.{name}"[^>]*><code>fc\.{name}<', index), name


def test_generated_references_have_what_the_program_has(site: Path) -> None:
    reference = tool("reference")
    settings = (site / "reference" / "settings.html").read_text()
    assert all(f"<code>{row['setting']}</code>" in settings for row in reference.listed("settings"))
    policies = (site / "reference" / "policies.html").read_text()
    assert all(f"<code>{row['policy']}</code>" in policies for row in reference.listed("policies"))
    commands = (site / "reference" / "command-line.html").read_text()
    for command in ("fedcover demo", "fedcover run", "fedcover deploy keys", "fedcover paper audit", "fedcover study"):
        assert f'id="{command.replace(" ", "-")}"' in commands
    assert "<!-- generated" not in "".join((settings, policies, commands))


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for page in pages(site):
        foreign = [file for file in parse(page).loads if re.match(r"(https?:)?//", file)]
        assert not foreign, f"{page.relative_to(site)}: {foreign}"
        assert 'class="mermaid"' not in page.read_text()  # the theme would fetch a library for it
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?(https?:)?//", style.read_text()), style.name


def test_the_crawl_can_fail(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="b.html">not in the text</a><article><a href="a.html"></a></article>')
    (tmp_path / "a.html").write_text('<nav class="md-tabs"><a href="index.html#top"></a></nav>')
    (tmp_path / "b.html").write_text("")
    assert linked_pages(tmp_path / "index.html") == {tmp_path / "a.html"}
    assert clicks(tmp_path) == {tmp_path / "index.html": 0, tmp_path / "a.html": 1}


def opened(site: Path) -> list[Path]:
    """Every page but the reports, which have tests of their own; of the rooms, which are alike, the largest."""
    reports = (site / "paper" / "index.html", site / "study" / "leaderboard.html")
    rooms = site / "reference" / "api"
    largest = sorted(rooms.glob("*.html"), key=lambda page: page.stat().st_size)[-4:]
    return [page for page in pages(site) if page not in reports and (page.parent != rooms or page in largest)]


def test_pages_in_a_browser(site: Path, browser: Browser) -> None:
    """Wide and narrow: no errors, nothing outside the page, a way to navigate, and no other host."""
    browser.scheme("light")
    for page in opened(site):
        browser.log()
        browser.resize(WIDE, 844)
        browser.open(page)
        for width in (WIDE, NARROW):
            browser.resize(width, 844, phone=width == NARROW)
            where = f"{page.relative_to(site)} at {width} px"
            assert browser.script(SCROLL) == 0, f"{where} scrolls sideways"
            assert browser.script(OUTSIDE) == [], where
            bar = ".md-tabs" if width == WIDE else ".md-header label[for=__drawer]"
            assert browser.script(f"return document.querySelector('{bar}').checkVisibility()"), f"{where}: no {bar}"
        assert all(name.startswith(("file:", "data:")) for name in browser.script(LOADED)), where
        severe = [entry["message"] for entry in browser.log() if entry["level"] in ("SEVERE", "WARNING")]
        assert not severe, f"{where}: {severe}"


def test_search_works_from_a_disk(site: Path, browser: Browser) -> None:
    browser.resize(WIDE, 844)
    browser.open(site / "index.html")
    browser.script(
        "const box = document.querySelector('.md-search__input'); box.focus(); box.value = 'FedRolex';"
        "box.dispatchEvent(new InputEvent('keyup', {bubbles: true}))"
    )
    count = "return document.querySelectorAll('.md-search-result__item').length"
    until = time.monotonic() + 20
    while not browser.script(count) and time.monotonic() < until:
        time.sleep(0.1)
    assert browser.script(count) > 0


def test_dark_colours_are_offered(site: Path, browser: Browser) -> None:
    browser.scheme("dark")
    browser.open(site / "index.html")
    browser.script("localStorage.clear()")
    browser.open(site / "index.html")
    assert browser.script("return document.body.dataset.mdColorScheme") == "slate"
