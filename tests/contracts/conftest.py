"""What the contracts of engines share: worker processes that stay open between tests."""

from collections.abc import Iterator

import pytest

from fedcover.engines.processes.pool import Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[bool, Processes]]:
    """Two worker processes without and with ``shrink``, by its value; they trace a shared task once."""
    with Processes(2, shrink=False) as whole, Processes(2, shrink=True) as shrunk:
        yield {False: whole, True: shrunk}
