"""Numbers as short text: one way to write each kind, in tables, tiles and sentences alike."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

MISSING = "–"


def percent(share: float | None, digits: int = 2) -> str:
    """Return a share in percent; a share above 0 never reads as 0.

    >>> percent(0.98047), percent(0.00001), percent(None)
    ('98.05 %', '< 0.01 %', '–')
    """
    if share is None:
        return MISSING
    if not math.isfinite(share):
        return "not finite"
    if 0 < share < 0.5 * 10 ** -(digits + 2):
        return f"< {10**-digits:.{digits}f} %"
    return f"{100 * share:.{digits}f} %"


def p_value(p: float, digits: int = 3) -> str:
    """Return a p-value, which never reads as 0.

    >>> p_value(0.0312), p_value(0.00002)
    ('0.031', '< 0.001')
    """
    return f"< {10**-digits:.{digits}f}" if p < 10**-digits else f"{p:.{digits}f}"


def percent_down(share: float) -> str:
    """Return a share in percent, rounded down: only a share of exactly 1 reads as 100 %.

    >>> percent_down(0.99999), percent_down(1.0)
    ('99.99 %', '100.00 %')
    """
    return f"{math.floor(share * 1e4 + 1e-9) / 1e2:.2f} %"


def rough_percent(share: float | None) -> str:
    """Return a share in percent for a sentence: a whole number, or one decimal below 10 %."""
    return percent(share, 1 if share is not None and 0 < abs(share) < 0.0995 else 0)


def decimal(value: float | None) -> str:
    """Return a loss or a delta^2 with four decimals, or in powers of ten if it is very small or large."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign, as a typographic minus.

    >>> signed(-0.338), signed(0.001)
    ('−0.34', '0.00')
    """
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(text.replace("−", "-")) == 0 else text


def mean_and_deviation(values: Sequence[float]) -> str:
    """Return the mean and the standard deviation, or a single value.

    >>> mean_and_deviation([97.0, 98.0]), mean_and_deviation([97.0])
    ('97.50 ± 0.71', '97.00')
    """
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def megabytes(count: float) -> str:
    """Return bytes in millions, to about three digits."""
    millions = count / 1e6
    if millions >= 100:
        return f"{millions:,.0f}"
    if millions >= 10:
        return f"{millions:.1f}"
    return f"{millions:.2f}" if millions >= 0.1 or millions == 0 else f"{millions:.2g}"


def seconds(value: float) -> str:
    """Return seconds for a table: ``0.42``, ``12.3``, ``1,240``."""
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def duration(value: float) -> str:
    """Return seconds for a sentence: ``8.1 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if value < 60:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def clients(sizes: tuple[int, int]) -> str:
    """Return the cohort's size or range: ``10``, ``8 to 10``."""
    least, most = sizes
    return f"{least}" if least == most else f"{least} to {most}"


def heading(metric: str) -> str:
    """Return the name of a metric as a heading.

    >>> heading("accuracy"), heading("rmse")
    ('Accuracy', 'RMSE')
    """
    return metric.upper() if len(metric) <= 4 else metric[:1].upper() + metric[1:]


def shorten(text: str, length: int) -> str:
    """Return the text, with its middle left out if it is longer than ``length``.

    >>> shorten("layers.0.attention.weight", 15)
    'layers.….weight'
    """
    if len(text) <= length:
        return text
    front = (length - 1) // 2
    return text[:front] + "…" + text[len(text) - (length - 1 - front) :]
