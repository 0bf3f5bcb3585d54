"""The report on the paper in a real browser: its tables and figures, in both themes, wide and narrow."""

from pathlib import Path

from tests.endtoend.browser import Browser, check_page

PAGE = Path(__file__).parents[2] / "docs" / "paper" / "index.html"


def test_the_page_looks_right(browser: Browser) -> None:
    check_page(browser, PAGE)


def test_tables_and_figures_are_found(browser: Browser) -> None:
    browser.show(PAGE, "light", 1280)
    labels = browser.script("return [...document.querySelectorAll('.scroll')].map((box) => box.ariaLabel)")
    for table in ("table1", "table2", "mnist-wp", "mnist-np", "mnist-fs", "cifar-wp", "cifar-fs"):
        assert f"{table}: accuracy" in labels
    figures = browser.script("return [...document.querySelectorAll('figure > .head .get')].map((g) => g.dataset.name)")
    assert len(figures) == 30
    assert {"figure-1", "figure-2a", "figure-2f", "policies", "cifar10-iid-fs-loss"} <= set(figures)
    assert browser.script("return document.querySelectorAll('.claim .tag').length") == 9
    captions = browser.script("return [...document.querySelectorAll('figure')].map((f) => f.innerText)")
    assert all("JPEG" in caption for caption in captions if "CIFAR-10 IID" in caption)
