"""What is closed at the end of a ``with``, whatever happens in it."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Something with an end: ``close``, which a ``with`` calls."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
