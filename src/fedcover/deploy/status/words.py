"""The parts of a fleet's state as words, for the console and for pages."""

from collections.abc import Mapping

from fedcover.deploy.status.fleet_status import RoundOverview
from fedcover.report.format import MISSING, duration, megabytes, percent


def ago(moment: float | None, now: float) -> str:
    """Return how long ago a moment was.

    >>> ago(97.0, 100.0), ago(0.0, 7200.0), ago(None, 1.0)
    ('3 s ago', '2 h ago', '–')
    """
    if moment is None:
        return MISSING
    seconds = max(now - moment, 0.0)
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def text_or_none(value: float | None, form: str = "") -> str:
    """Return a number in a format, or a dash.

    >>> text_or_none(1797, ","), text_or_none(None)
    ('1,797', '–')
    """
    return MISSING if value is None else format(value, form)


def megabytes_or_none(count: float | None) -> str:
    """Return bytes in millions, or a dash."""
    return MISSING if count is None else megabytes(count)


def percent_or_none(share: float | None) -> str:
    """Return a share in percent with one decimal, or ``unknown``."""
    return "unknown" if share is None else percent(share, 1)


def refusals_text(refusals: Mapping[str, int]) -> str:
    """Return counts of refused requests by reason, the most frequent first.

    >>> refusals_text({"a": 1, "b": 7})
    '7 b, 1 a'
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(refusals.items(), key=lambda item: -item[1]))


def round_line(newest: RoundOverview) -> str:
    """Return the time, the bytes and the accuracy of the newest round in one line."""
    planned = f" of {newest.rounds}" if newest.rounds else ""
    parts = [duration(newest.seconds), f"{megabytes(newest.down + newest.up)} MB"]
    if newest.accuracy is not None:
        parts.append(f"accuracy {percent(newest.accuracy)}")
    return f"round {newest.round}{planned}: {', '.join(parts)}"


def coverage_line(newest: RoundOverview) -> str:
    """Return the coverage of the newest round in one line."""
    parts = []
    if newest.gamma_min is not None:
        parts.append(f"Γmin {newest.gamma_min}")
    if newest.uncovered is not None:
        parts.append(f"{percent(newest.uncovered, 1)} of the model uncovered")
    if newest.robust_to is not None:
        parts.append(f"robust to {newest.robust_to} malicious clients")
    return ", ".join(parts)
