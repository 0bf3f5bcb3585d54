"""Stop signals, handled like Ctrl-C: at once, or deferred to a safe point."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name)]


class StopSignal:
    """A signal handler that raises KeyboardInterrupt at once or, while ``deferred`` is set, at the next ``check``."""

    deferred = received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        self.received = True
        if not self.deferred:
            raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal was received."""
        if self.received:
            raise KeyboardInterrupt


@contextmanager
def stop_signals(leave: bool = True) -> Iterator[StopSignal]:
    """Treat SIGTERM and SIGHUP like Ctrl-C inside the block; with ``leave``, suppress the KeyboardInterrupt."""
    stop = StopSignal()
    numbers = [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup ignores one
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield stop
    except KeyboardInterrupt:
        if not leave:
            raise
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
