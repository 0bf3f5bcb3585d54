"""The report of real runs, opened in a real browser."""

import time
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedcover.cli import app
from fedcover.report import write_report
from tests.endtoend.browser import VIEWS, WIDE, Browser, check_page

ROUNDS = 3
NAMES = ("whole", "the-first-half-of-each-hidden-layer-for-everybody")


@pytest.fixture(scope="module")
def runs(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two short runs on the digits; the second leaves entries uncovered, and its page warns of it."""
    folder = tmp_path_factory.mktemp("runs")
    for name, policy, code in zip(NAMES, ("WP", "FS"), ("1111223344", "4444444444"), strict=True):
        settings = {"name": name, "rounds": ROUNDS, "data.name": "digits", "data.clients": 20, "local.epochs": 1}
        settings |= {"policy.name": policy, "budgets.code": code}
        changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        done = CliRunner().invoke(app, ["run", *changes, "--quiet", "--out", str(folder / policy)])
        assert done.exit_code == 0, done.output
    return [folder / "WP", folder / "FS"]


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(runs, tmp_path_factory.mktemp("page") / "compare.html")


def test_the_page_of_a_run_is_sound_in_every_view(browser: Browser, runs: list[Path]) -> None:
    check_page(browser, runs[1] / "report.html")


def test_a_comparison_is_sound_in_every_view(browser: Browser, page: Path) -> None:
    check_page(browser, page)


@pytest.mark.parametrize(("scheme", "width"), VIEWS)
def test_a_comparison_has_its_tables_figures_and_buttons(
    browser: Browser, page: Path, runs: list[Path], scheme: str, width: int
) -> None:
    browser.show(page, scheme, width)
    config = tomllib.loads((runs[0] / "config.toml").read_text())
    settings = sum(len(value) if isinstance(value, dict) else 1 for value in config.values())
    tables = browser.script("""
        const label = (table) => table.closest("[aria-label]").ariaLabel;
        return [...document.querySelectorAll("table")].map((table) => [label(table), table.tBodies[0].rows.length]);
    """)
    assert tables[:-1] == [
        ["Runs compared", 2],
        [f"Rounds of {NAMES[0]}", ROUNDS],
        [f"Rounds of {NAMES[1]}", ROUNDS],
        ["Different between the runs", 3],  # name, policy.name, budgets.code
        ["The same in all runs", settings - 3],
    ]
    figures = browser.script("""
        const buttons = (figure) => [...figure.querySelectorAll("button")].filter((button) => button.checkVisibility());
        return [...document.querySelectorAll("figure")].map((figure) => [
            figure.querySelectorAll(":scope > svg").length, buttons(figure).map((button) => button.textContent),
        ]);
    """)
    assert len(figures) == 6 + len(runs)
    assert all(figure == [1, ["SVG", "PNG"]] for figure in figures)


@pytest.mark.parametrize("kind", ["SVG", "PNG"])
def test_a_figure_can_be_saved(browser: Browser, page: Path, tmp_path: Path, kind: str) -> None:
    browser.save_into(tmp_path)
    browser.show(page, "dark", WIDE)
    width = browser.script(
        """
        const figure = document.querySelector("figure");
        [...figure.querySelectorAll("button")].find((button) => button.textContent === arguments[0]).click();
        return figure.querySelector(":scope > svg").viewBox.baseVal.width;
        """,
        kind,
    )
    saved = tmp_path / f"accuracy.{kind.lower()}"
    until = time.monotonic() + 20
    while not (saved.exists() and saved.stat().st_size) and time.monotonic() < until:
        time.sleep(0.02)
    raw = saved.read_bytes()
    if kind == "SVG":
        assert raw.startswith(b"<svg")
        assert b"var(" not in raw
    else:
        assert raw.startswith(b"\x89PNG")
        assert int.from_bytes(raw[16:20]) == int(3 * width)
    assert browser.log() == []
