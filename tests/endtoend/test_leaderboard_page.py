"""The referee's leaderboard in a real browser: filters, seeds under the pointer, sorting, and curves on a click."""

from pathlib import Path
from typing import Any

import pytest

from fedcover_experiments.referee.leaderboard import leaderboard
from fedcover_experiments.referee.rows import load_results
from tests.endtoend.browser import NARROW, SMALL_TEXT, WIDE, Browser, check_page

DOCS = Path(__file__).parents[2] / "docs" / "study"
PAGE = DOCS / "leaderboard.html"
SIZES = pytest.mark.parametrize("width", [WIDE, NARROW])
VISIBLE = """
    const rows = [...document.querySelectorAll(".leaderboard tbody tr")].filter((row) => !row.hidden);
    return rows.map((row) => [row.cells[0].innerText.trim(), row.cells[1].innerText.trim()]);
"""


def choose(browser: Browser, name: str, value: str) -> list[list[str]]:
    """Set one filter; return the method and the setting of each row that is still shown."""
    browser.script(
        """
        const field = document.querySelector(`.filters [name="${arguments[0]}"]`);
        field.value = arguments[1];
        field.dispatchEvent(new Event("input", { bubbles: true }));
        """,
        name,
        value,
    )
    rows: list[list[str]] = browser.script(VISIBLE)
    return rows


@SIZES
def test_filters_show_a_setting_a_kind_or_some_methods(browser: Browser, width: int) -> None:
    entries = leaderboard(load_results(DOCS / "referee.json"))
    browser.show(PAGE, "light", width)
    assert browser.script(VISIBLE) == [[entry.method, entry.setting] for entry in entries]
    setting = entries[0].setting
    assert choose(browser, "setting", setting) == [[e.method, e.setting] for e in entries if e.setting == setting]
    assert {method for method, _ in choose(browser, "method", "rolex, fs")} == {"FedRolex", "FS"}
    assert choose(browser, "kind", "reference") == []
    assert browser.script("return document.querySelector('.filters output').value") == f"0 of {len(entries)} rows"
    choose(browser, "method", "")
    shown = choose(browser, "setting", "all")
    assert {method for method, _ in shown} == {"FedAvg", "smallest"}
    assert browser.log() == []


@SIZES
def test_sorting_keeps_the_filter(browser: Browser, width: int) -> None:
    browser.show(PAGE, "light", width)
    choose(browser, "kind", "width")
    before = browser.script(VISIBLE)
    accuracies: list[Any] = browser.script("""
        const table = document.querySelector(".leaderboard table"), heads = [...table.tHead.rows[0].cells];
        const column = heads.findIndex((head) => head.innerText.trim().startsWith("accuracy"));
        heads[column].querySelector("button").click();
        const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden);
        return shown.map((row) => parseFloat(row.cells[column].innerText));
    """)
    assert accuracies == sorted(accuracies)
    assert sorted(browser.script(VISIBLE)) == sorted(before)


def test_the_pointer_on_an_accuracy_shows_its_seeds(browser: Browser) -> None:
    entry = leaderboard(load_results(DOCS / "referee.json"))[0]
    browser.show(PAGE, "light", WIDE)
    title = browser.script("return document.querySelector('.leaderboard td[title^=seed]').title")
    assert title == ", ".join(f"seed {row.seed}: {100 * (row.accuracy or 0):.2f}" for row in entry.rows)


@SIZES
def test_a_click_on_a_method_opens_the_curves_of_its_setting(browser: Browser, width: int) -> None:
    settings = {entry.setting for entry in leaderboard(load_results(DOCS / "referee.json"))}
    browser.show(PAGE, "light", width)
    state = "return [...document.querySelectorAll('details.curves')].map((part) => part.open)"
    browser.script("document.querySelectorAll('details.curves').forEach((part) => { part.open = false; })")
    assert browser.script(state) == [False] * len(settings)
    method, setting, opened = browser.script("""
        const row = [...document.querySelectorAll(".leaderboard tbody tr")].at(-1);
        row.cells[0].querySelector("button").click();
        const part = document.querySelector("details.curves[open]"), box = part.getBoundingClientRect();
        return [row.cells[0].innerText.trim(), row.cells[1].innerText.trim(),
                [part.dataset.curves.split(" ")[0], box.top < innerHeight && box.bottom > 0]];
    """)
    assert opened == [setting, True]
    assert browser.script(state).count(True) == 1
    dim = browser.script("""
        const parts = [...document.querySelectorAll("details.curves[open] svg [data-series]")];
        return [...new Set(parts.filter((part) => !part.classList.contains("dim")).map((part) => part.dataset.series))];
    """)
    assert dim == [method]


@SIZES
def test_the_page_is_sound(browser: Browser, width: int) -> None:
    browser.show(PAGE, "light", width)
    assert browser.script(SMALL_TEXT) == []


def test_the_page_is_sound_and_complete_without_its_script(browser: Browser, tmp_path: Path) -> None:
    check_page(browser, PAGE)
    html = PAGE.read_text()
    assert len(html.encode()) < 2_000_000
    plain = tmp_path / "plain.html"
    plain.write_text(html[: html.index("<script>")] + "</body></html>")
    check_page(browser, plain)
    assert len(browser.script(VISIBLE)) == len(leaderboard(load_results(DOCS / "referee.json")))
