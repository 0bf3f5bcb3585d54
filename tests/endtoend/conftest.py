"""What the end-to-end tests share: a browser."""

import os
from collections.abc import Iterator

import pytest

from tests.endtoend.browser import Browser, missing


@pytest.fixture(scope="session")
def only_browser() -> Iterator[Browser]:
    """A headless browser; without one on this machine the test is skipped, or fails if FEDCOVER_BROWSER=require."""
    if lacks := missing():
        if os.environ.get("FEDCOVER_BROWSER") == "require":
            pytest.fail(f"FEDCOVER_BROWSER=require, but there is {lacks}")
        pytest.skip(f"pages are not opened: there is {lacks}")
    with Browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(only_browser: Browser) -> Browser:
    """The browser of all tests of a process, with an empty page and without what other modules have set."""
    only_browser.reset()
    return only_browser
