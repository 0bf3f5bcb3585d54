"""Lines about the progress of runs in Python, for callers who ask for them; the library prints nothing otherwise."""

import sys
import time
from collections.abc import Callable

from fedcover.errors import check_bool
from fedcover.federation.history import RoundRecord

OnRound = Callable[[int, RoundRecord], None]
"""Called with the number of a run and the record of a round."""
EVERY = 2.0
"""The least number of seconds between two lines, except the last."""


class ProgressLines:
    """Prints to stderr how far runs are: after the first round, every few seconds, and after the last round.

    Args:
        rounds: The number of rounds of each run.
        runs: The number of runs.
    """

    def __init__(self, rounds: int, runs: int = 1) -> None:
        self._rounds, self._runs = rounds, runs
        self._round_of: dict[int, int] = {}
        self._start, self._last, self._played = time.monotonic(), 0.0, 0

    def show(self, number: int, record: RoundRecord) -> None:
        """Print a line about a round of a run, unless the last line is too recent."""
        self._played += 1
        self._round_of[number] = record.round
        now, done = time.monotonic(), sum(self._round_of.values())
        total = self._rounds * self._runs
        if self._played > 1 and now - self._last < EVERY and done < total:
            return
        self._last = now
        seconds = now - self._start
        left = seconds / self._played * (total - done)
        time_left = f", about {_duration(left)} left" if done < total else ""
        what = f"round {record.round} of {self._rounds}: {_scores(record)}"
        if self._runs > 1:
            what = f"{done} of {total} rounds of {self._runs} runs"
        print(f"{what} ({_duration(seconds)}{time_left})", file=sys.stderr, flush=True)


def with_progress(on_round: OnRound, progress: object, rounds: int, runs: int = 1) -> OnRound:
    """Return a function that is called after each round, and prints lines too if ``progress`` is True.

    Args:
        on_round: The caller's own function, called first.
        progress: True or False.
        rounds: The number of rounds of each run.
        runs: The number of runs.
    """
    check_bool("progress", progress)
    if not progress:
        return on_round
    lines = ProgressLines(rounds, runs)

    def follow(number: int, record: RoundRecord) -> None:
        on_round(number, record)
        lines.show(number, record)

    return follow


def _scores(record: RoundRecord) -> str:
    values = {"accuracy": record.accuracy, **record.metrics, "loss": record.loss}
    if record.loss is None:
        values["train loss"] = record.train_loss
    scores = [f"{name} {value:.4g}" for name, value in values.items() if value is not None]
    return ", ".join([*scores, f"Γmin {record.gamma_min}"])


def _duration(seconds: float) -> str:
    """Return a time in words.

    >>> _duration(4.26), _duration(150), _duration(7300)
    ('4.3 s', '2 min 30 s', '2 h 1 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:.0f} min"
