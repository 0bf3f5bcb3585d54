"""The log of a run's server side: one sentence for what users can fix, a traceback only for bugs.

Flower logs the traceback of every error that a ServerApp raises, then a code and a link. Its process serves one run, so
that a filter on Flower's logger can shorten both for errors that fedcover raises on purpose.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedcover._files import full_disk_error
from fedcover.errors import FedcoverError


class SentenceFilter(logging.Filter):
    """Reduce the traceback of a FedcoverError to its sentence, and drop Flower's lines about the exit after it."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Change a record; return whether to keep it."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, FedcoverError):
            record.msg, record.args, record.exc_info, record.exc_text = "%s", (str(error),), None, None
            self._ended = True
            return True
        return not (self._ended and record.getMessage().startswith("Exit Code:"))


@contextmanager
def sentences() -> Iterator[None]:
    """Make errors and warnings of fedcover one line each in the log of this process.

    The filter stays after the block, since Flower logs an error when it has left the ServerApp.
    """
    logger = logging.getLogger("flwr")
    for old in [one for one in logger.filters if isinstance(one, SentenceFilter)]:
        logger.removeFilter(old)
    logger.addFilter(SentenceFilter())
    with warnings.catch_warnings():
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
            if category.__module__ == "fedcover.errors":
                print(f"warning: {message}", flush=True)
            else:
                show_other(message, category, *location, **options)

        warnings.showwarning = show
        try:
            yield
        except OSError as error:
            raise full_disk_error(error) or error from None
