"""Ctrl-C that is not lost: a KeyboardInterrupt that some code swallows is raised again at the next safe point.

Signals arrive anywhere, also in code with a bare ``except``, such as ``copyreg`` of the standard library.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """A handler of SIGINT that raises KeyboardInterrupt, and remembers that it did."""

    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.received = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received."""
        if self.received:
            raise KeyboardInterrupt


@contextmanager
def noted_interrupts() -> Iterator[Interrupts]:
    """Note SIGINT inside the block; a handler that is not Python's own stays as it is, as do other threads."""
    interrupts = Interrupts()
    main = threading.current_thread() is threading.main_thread()
    ours = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
