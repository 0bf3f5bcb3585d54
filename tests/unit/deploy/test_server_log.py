"""The log of a run's server side has sentences for what users can fix, and tracebacks for bugs."""

import errno
import logging
import warnings
from collections.abc import Iterator

import pytest

from fedcover.deploy.flower.server_log import sentences
from fedcover.errors import CheckpointWarning, InputError


class Lines(logging.Handler):
    """A handler that keeps formatted lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def log() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("flwr")
    filters = list(logger.filters)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.filters[:] = filters


def as_flower(error: Exception) -> None:
    """Log an error as the process of a ServerApp does."""
    logger = logging.getLogger("flwr")
    try:
        with sentences():
            raise error
    except Exception as raised:
        logger.error("%s raised an exception", "ServerApp", exc_info=raised)
        logger.error("Exit Code: 200\n\nFor more information, visit: <https://flower.ai>")


def test_a_sentence_for_what_users_can_fix(log: Lines) -> None:
    as_flower(InputError("the folder is in use; wait for it"))
    assert log.lines == ["the folder is in use; wait for it"]


def test_a_full_disk_that_other_code_found(log: Lines) -> None:
    as_flower(OSError(errno.ENOSPC, "No space left on device"))
    (line,) = log.lines
    assert line.startswith("a disk is full; free some space")


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError(errno.EBADF, "Bad file descriptor")])
def test_a_bug_keeps_its_traceback(log: Lines, error: Exception) -> None:
    as_flower(error)
    trace, end = log.lines
    assert "Traceback" in trace
    assert "in as_flower" in trace
    assert end.startswith("Exit Code: 200")


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with sentences():
        warnings.simplefilter("always")
        warnings.warn("checkpoint 2 cannot be used", CheckpointWarning, stacklevel=1)
    assert capsys.readouterr().out == "warning: checkpoint 2 cannot be used\n"
