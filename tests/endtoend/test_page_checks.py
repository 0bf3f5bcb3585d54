"""What any page owes, as the checks of the other tests see it: each fault of a page is reported."""

import itertools
from pathlib import Path

import pytest

from tests.endtoend.browser import Browser, check_page

GOOD = """<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark"></head>
<body><p>Text</p><figure><svg viewBox="0 0 90 9"><text y="9" fill="currentColor">7</text></svg></figure>{}"""
FRAME = "<rect width='90' height='9' fill='none' stroke='gray'/>"


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("", ""),
        ("<script>console.warn('beware')</script>", "beware"),
        ("<script>nothing()</script>", "nothing is not defined"),
        ("<div style='width: 2000px'>wide</div>", "scrolls sideways"),
        ("<div style='overflow-x: auto'><table><td style='min-width: 2000px'>wide</td></table></div>", ""),
        (
            "<div style='overflow: hidden'><table><td style='min-width: 2000px'>cut</td></table></div>",
            "outside the page",
        ),
        ("<table><th>head</th></table>", "has no cells"),
        ("<figure><svg aria-label='flat' style='height: 0'></svg></figure>", '"flat" is not visible'),
        ("<p style='color: #888'>grey</p>", '"grey" has a contrast of 3.5'),
        ("<p style='opacity: 0.5'>pale</p>", '"pale" has a contrast of'),
        (f"<figure><svg viewBox='0 0 90 9'>{FRAME}<text y='9'>5</text></svg></figure>", 'dark, 1280 px: <text> "5"'),
        ("<style>:root { color-scheme: light }</style>", "the dark scheme is not light on dark"),
    ],
    ids=itertools.count(),
)
def test_faults_of_a_page_are_reported(browser: Browser, tmp_path: Path, fault: str, problem: str) -> None:
    path = tmp_path / "page.html"
    path.write_text(GOOD.format(fault))
    if not problem:
        check_page(browser, path)
        return
    with pytest.raises(AssertionError) as caught:
        check_page(browser, path)
    assert problem in str(caught.value)


def test_a_page_without_a_layout_for_phones_is_reported(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(GOOD.format("").replace("viewport", "none"))
    with pytest.raises(AssertionError, match="light, 390 px: the page is laid out for 980 px"):
        check_page(browser, path)
