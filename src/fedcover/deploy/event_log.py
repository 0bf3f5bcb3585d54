"""A log of events as lines of JSON, in a file that is rotated."""

import datetime
import json
import logging.handlers
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcover._files import write_error

MAX_BYTES = 10 << 20
BACKUPS = 5


class EventLog:
    """A file of events, one JSON object per line, with ``time`` in UTC and ``event``.

    A file of 10 MiB is renamed to ``NAME.1``, and so on; five are kept. Only the owner can read them. Close it, or use
    it with ``contextlib.closing``.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            _create(path)
            self._handler = logging.handlers.RotatingFileHandler(path, maxBytes=MAX_BYTES, backupCount=BACKUPS)
        except OSError as error:
            raise write_error(path, error) from error
        self._handler.rotator = _rotate
        self._handler.handleError = lambda record: None  # type: ignore[method-assign]  # a full disk ends no service

    def write(self, event: str, **fields: Any) -> None:
        """Write an event; a failure to write is ignored, since the log is not what the service is for."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        text = json.dumps({"time": now, "event": event, **fields}, default=str)
        self._handler.handle(logging.LogRecord("fedcover", logging.INFO, "", 0, "%s", (text,), None))

    def close(self) -> None:
        """Close the file; what a full disk has no room for is lost."""
        with suppress(OSError):
            self._handler.close()


def _create(path: str | Path) -> None:
    """Create a file that only its owner can read, unless it exists."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def _rotate(source: str, target: str) -> None:
    """Rename a file, and begin another with its name."""
    os.replace(source, target)
    _create(source)
