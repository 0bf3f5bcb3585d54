"""A contender's side of the contest: rounds are played when asked for over stdin; answers are JSON lines on stdout."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

import torch


class Player:
    """Waits for commands, times rounds, answers. Whatever libraries print goes to stderr.

    A contender calls ``ready`` once, then plays a round whenever ``wait`` gives True and calls ``done`` after it.
    """

    def __init__(self, score: Callable[[], float | None], packages: tuple[str, ...] = ()) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._score = score
        self._versions = {name: version(name) for name in packages}
        self._started = 0.0

    def ready(self) -> None:
        """Say that rounds can be played."""
        self._say(ready=True, threads=torch.get_num_threads(), versions={"torch": torch.__version__, **self._versions})

    def wait(self) -> bool:
        """Answer commands until a round is asked for (True) or no more will be (False)."""
        for line in sys.stdin:
            command = line.strip()
            if command == "play":
                self._started = time.perf_counter()
                return True
            if command == "score":
                self._say(accuracy=self._score())
            elif command == "memory":
                self._say(peak_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            else:
                break
        return False

    def done(self) -> None:
        """Say that the round is over."""
        self._say(seconds=time.perf_counter() - self._started)

    def _say(self, **facts: object) -> None:
        print(json.dumps(facts), file=self._answers)
