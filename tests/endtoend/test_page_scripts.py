"""Pages in a real browser: values under the pointer, legends, sorting, contents and the size of text."""

from pathlib import Path
from typing import Any

import pytest

from fedcover.report import write_report
from tests.endtoend.browser import NARROW, SMALL_TEXT, WIDE, Browser, check_page
from tests.unit.report.conftest import make_record, write_run

METHODS = {"full": 0.98, "WP": 0.95, "a-fixed-part-of-every-layer": 0.9}
PAPER = Path(__file__).parents[2] / "docs" / "paper" / "index.html"
SIZES = pytest.mark.parametrize("width", [WIDE, NARROW])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of three methods over two seeds."""
    folder = tmp_path_factory.mktemp("runs")
    paths = []
    for policy, final in METHODS.items():
        for seed in (0, 1):
            records = [make_record(n, seed=seed, final=final) for n in range(1, 31)]
            name = f"{policy}-seed{seed}"
            paths.append(write_run(folder / name, records, name=name, seed=seed, policy={"name": policy}))
    return write_report(paths, folder / "page.html")


def place(browser: Browser, figure: str, x: float, y: float) -> list[float]:
    """Scroll to a figure; return a place in the window from shares of the width and height of its first panel."""
    result: list[float] = browser.script(
        """
        const svg = document.querySelector(`#figure-${arguments[0]} > svg`), data = svg.querySelector("metadata");
        svg.scrollIntoView({ block: "center", behavior: "instant" });
        const [left, top, right, bottom] = JSON.parse(data.textContent)[0].box, box = svg.getBoundingClientRect();
        const scale = box.width / svg.viewBox.baseVal.width;
        const at = (low, high, share) => (low + share * (high - low)) * scale;
        return [box.left + at(left, right, arguments[1]), box.top + at(top, bottom, arguments[2])];
        """,
        figure,
        x,
        y,
    )
    return result


def tip(browser: Browser, figure: str) -> str:
    """The text shown beside the pointer, which must lie inside the figure; "" if nothing is shown."""
    text: str = browser.script(
        """
        const figure = document.querySelector(`#figure-${arguments[0]}`), tip = figure.querySelector(".tip");
        if (tip.hidden) return "";
        const [inner, outer] = [tip, figure].map((element) => element.getBoundingClientRect());
        if (inner.left < outer.left || inner.right > outer.right + 0.5) return "outside the figure";
        return tip.innerText;
        """,
        figure,
    )
    return text


def values(at: int) -> dict[str, float]:
    """The mean accuracy of each method in a round, from the records themselves."""
    means = {}
    for policy, final in METHODS.items():
        records = [make_record(at, seed=seed, final=final) for seed in (0, 1)]
        means[policy] = sum(100 * (record.accuracy or 0) for record in records) / 2
    return means


def numbers_in(text: str) -> dict[str, float]:
    """The value of each series in a tip: its line is a name, the value, and the band."""
    found = {}
    for line in text.splitlines()[1:]:
        for policy in METHODS:
            if line.startswith(policy):
                found[policy] = float(line.removeprefix(policy).split()[0])
    return found


@SIZES
def test_the_pointer_shows_the_round_and_every_value(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, "light", width)
    browser.point(*place(browser, "accuracy", 19 / 29, 0.5), touch=width == NARROW)
    text = tip(browser, "accuracy")
    assert text.splitlines()[0] == "round 20", text
    assert numbers_in(text) == pytest.approx(values(20), abs=0.006)
    assert browser.script("return document.querySelectorAll('#figure-accuracy .marks circle').length") == 3
    assert browser.log() == []


@SIZES
def test_arrow_keys_show_values_too(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, "light", width)
    browser.script("document.querySelector('#figure-accuracy > svg').focus()")
    browser.press("ArrowLeft")
    assert tip(browser, "accuracy").startswith("round 30")
    browser.press("ArrowLeft")
    assert numbers_in(tip(browser, "accuracy")) == pytest.approx(values(29), abs=0.006)
    browser.press("Escape")
    assert tip(browser, "accuracy") == ""


@SIZES
def test_a_map_shows_tensor_round_and_coverage(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, "light", width)
    browser.point(*place(browser, "coverage-full", 0.52, 0.1), touch=width == NARROW)
    assert tip(browser, "coverage-full").splitlines() == ["round 16", "fc1.weight", "least coverage 4"]


def shown(browser: Browser) -> dict[str, list[str]]:
    """For each figure, the series that it shows."""
    result: dict[str, list[str]] = browser.script("""
        const visible = (part) => getComputedStyle(part).display !== "none" && part.getBoundingClientRect().width > 0;
        return Object.fromEntries([...document.querySelectorAll("figure")].map((figure) => {
            const parts = [figure, ...figure.querySelectorAll("[data-series]")].filter((part) => part.dataset.series);
            return [figure.id, [...new Set(parts.filter(visible).map((part) => part.dataset.series))]];
        }));
    """)
    return result


@SIZES
def test_the_legend_hides_a_method_in_every_figure(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, "light", width)
    before = shown(browser)
    charts = [name for name, series in before.items() if len(series) == 3]
    assert len(charts) == 6
    click = "document.querySelectorAll('.legend.shared button')[arguments[0]].click()"
    browser.script(click, 1)
    after = shown(browser)
    assert all(after[name] == ["full", "a-fixed-part-of-every-layer"] for name in charts)
    assert after["figure-coverage-wp"] == []
    assert after["figure-coverage-full"] == ["full"]
    browser.point(*place(browser, "accuracy", 0.5, 0.5), touch=width == NARROW)
    assert set(numbers_in(tip(browser, "accuracy"))) == {"full", "a-fixed-part-of-every-layer"}
    browser.script(click, 1)
    assert shown(browser) == before
    double = "new MouseEvent('dblclick')"
    browser.script(f"document.querySelectorAll('.legend.shared button')[2].dispatchEvent({double})")
    assert all(shown(browser)[name] == ["a-fixed-part-of-every-layer"] for name in charts)


@SIZES
def test_the_legend_highlights_a_method(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, "light", width)
    browser.script("document.querySelectorAll('.legend.shared button')[0].focus()")
    faint = "return [...new Set([...document.querySelectorAll('svg .dim')].map((part) => part.dataset.series))].sort()"
    assert browser.script(faint) == ["WP", "a-fixed-part-of-every-layer"]
    browser.script("document.activeElement.blur()")
    assert browser.script(faint) == []


@SIZES
def test_a_click_on_a_header_sorts_the_table(browser: Browser, page: Path, width: int) -> None:
    browser.show(page, "light", width)

    def column(number: int) -> list[str]:
        cells: list[str] = browser.script(
            """
            const table = document.querySelector("[aria-label='Methods compared'] table");
            return [...table.tBodies[0].rows].map((row) => row.cells[arguments[0]].innerText.trim());
            """,
            number,
        )
        return cells

    def sort(number: int) -> Any:
        return browser.script(
            """
            const head = document.querySelector("[aria-label='Methods compared'] thead").rows[0].cells[arguments[0]];
            head.querySelector("button").click();
            return head.ariaSort;
            """,
            number,
        )

    assert column(0) == list(METHODS)
    assert sort(2) == "ascending"
    assert column(0) == list(METHODS)[::-1]  # by accuracy
    assert sort(2) == "descending"
    assert column(0) == list(METHODS)
    assert sort(0) == "ascending"
    assert column(0) == ["a-fixed-part-of-every-layer", "full", "WP"]
    marked = "return document.querySelectorAll(\"[aria-label='Methods compared'] [aria-sort]\").length"
    assert browser.script(marked) == 1
    browser.script("document.querySelector(\"[aria-label='Methods compared'] .sort\").focus()")
    browser.press("Enter")
    assert column(0) == ["WP", "full", "a-fixed-part-of-every-layer"]


@pytest.mark.parametrize("path", ["report", "paper"])
@SIZES
def test_the_contents_lead_to_the_sections(browser: Browser, page: Path, width: int, path: str) -> None:
    browser.show(PAPER if path == "paper" else page, "light", width)
    links = browser.script("return [...document.querySelectorAll('.contents a')].map((a) => a.hash)")
    assert len(links) >= 5
    assert len(set(links)) == len(links)
    tops = browser.script(
        """
        const at = (link) => {
            document.querySelector(`.contents a[href="${link}"]`).click();
            return document.getElementById(link.slice(1)).getBoundingClientRect().top;
        };
        return arguments[0].map(at);
        """,
        links,
    )
    assert all(-1 <= top <= 844 for top in tops)
    assert tops[0] < 40


@pytest.mark.parametrize("path", ["report", "paper"])
@SIZES
def test_no_text_is_smaller_than_12_pixels(browser: Browser, page: Path, width: int, path: str) -> None:
    browser.show(PAPER if path == "paper" else page, "light", width)
    assert browser.script(SMALL_TEXT) == []


def test_small_text_is_noticed(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        "<!DOCTYPE html><p style='font-size: 11px'>tiny</p><figure><svg viewBox='0 0 600 60' width='300'>"
        "<text y='20' font-size='20'>drawn</text></svg></figure>"
    )
    browser.show(tmp_path / "page.html", "light", WIDE)
    assert browser.script(SMALL_TEXT) == ["tiny: 11.00 px", "drawn: 10.00 px"]


def test_wide_tables_on_a_phone_have_a_hint_and_whole_codes(browser: Browser) -> None:
    browser.show(PAPER, "light", NARROW)
    hints = browser.script("""
        const wide = [...document.querySelectorAll(".scroll")].filter((box) => box.scrollWidth > box.clientWidth + 1);
        const hint = (box) => getComputedStyle(box, "::before").content.includes("scroll sideways");
        return [wide.length, wide.every(hint)];
    """)
    assert hints[0] > 5
    assert hints[1]
    broken = browser.script(r"""
        const range = document.createRange(), broken = [];
        const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
          for (const code of walker.currentNode.data.matchAll(/\b[1-7]{10}\b/g)) {
            range.setStart(walker.currentNode, code.index);
            range.setEnd(walker.currentNode, code.index + 10);
            if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) broken.push(code[0]);
          }
        }
        return broken;
    """)
    assert broken == []


def test_the_page_is_sound_and_complete_without_its_script(browser: Browser, page: Path, tmp_path: Path) -> None:
    check_page(browser, page)
    html = page.read_text()
    plain = tmp_path / "plain.html"
    plain.write_text(html[: html.index("<script>")] + "</body></html>")
    check_page(browser, plain)
    names = browser.script("return [...document.querySelectorAll('.legend.shared li')].map((item) => item.innerText)")
    assert names == list(METHODS)


def test_pages_stay_small_and_offline(page: Path) -> None:
    for path in (page, PAPER):
        html = path.read_text()
        assert len(html.encode()) < 2_000_000
        assert "default-src 'none'" in html
        assert "connect-src" not in html
