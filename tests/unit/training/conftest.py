"""Fixtures of the tests of local training."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcover.training.steps.native import library


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """An empty cache folder, so that the library is built again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.cache_clear()
    yield monkeypatch
    library.cache_clear()
