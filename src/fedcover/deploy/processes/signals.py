"""Signals to end, as Ctrl-C: at once, or as soon as it does no harm."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Asked:
    """What happens on a signal to end: a KeyboardInterrupt at once, or ``later``, at the next ``check``."""

    later = signalled = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        self.signalled = True
        if not self.later:
            raise KeyboardInterrupt

    def check(self) -> None:
        """A KeyboardInterrupt if there was a signal."""
        if self.signalled:
            raise KeyboardInterrupt


@contextmanager
def until_asked(leave: bool = True) -> Iterator[Asked]:
    """SIGTERM and SIGHUP end what is inside as Ctrl-C does; if that is how it is meant to ``leave``, all is well."""
    asked, numbers = Asked(), (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.signal(number, asked) for number in numbers]
    try:
        yield asked
    except KeyboardInterrupt:
        if not leave:
            raise
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
