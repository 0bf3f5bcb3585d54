"""A contender's side of the contest: commands come over stdin, replies are JSON lines on stdout."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch


class Player:
    """The connection of a contender with the contest. Other output of the process goes to stderr.

    A contender calls ``ready`` once. Then it plays a round whenever ``wait`` returns True, and calls ``done`` after it.

    Args:
        score: Computes the accuracy of the current model, or None.
        packages: Packages whose versions are reported.
    """

    def __init__(self, score: Callable[[], float | None], packages: tuple[str, ...] = ()) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._score = score
        self._versions = {name: version(name) for name in packages}
        self._started = 0.0

    def ready(self) -> None:
        """Report that rounds can be played."""
        self._reply(
            ready=True, threads=torch.get_num_threads(), versions={"torch": torch.__version__, **self._versions}
        )

    def wait(self) -> bool:
        """Reply to commands until a round is requested (True) or the input ends (False)."""
        for line in sys.stdin:
            command = line.strip()
            if command == "play":
                self._started = time.perf_counter()
                return True
            if command == "score":
                self._reply(accuracy=self._score())
            elif command == "memory":
                self._reply(peak_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            else:
                break
        return False

    def done(self) -> None:
        """Report the seconds of the round that has ended."""
        self._reply(seconds=time.perf_counter() - self._started)

    def _reply(self, **facts: object) -> None:
        print(json.dumps(facts), file=self._replies)
