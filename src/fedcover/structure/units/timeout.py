"""A limit on how long something in Python may take, for what cannot be trusted to end."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TooLongError(Exception):
    """It took longer than it may."""


def call_with_timeout(seconds: float, work: Callable[[], T]) -> T:
    """What ``work`` returns or raises, in a thread of its own; ``TooLongError`` if it is not done in time.

    >>> call_with_timeout(10, lambda: 7)
    7
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="fedcover-patience")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        # The thread gets the error between two of its Python instructions, and ends.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TooLongError))
        thread.join(5)
        raise TooLongError(f"it was not done after {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]
