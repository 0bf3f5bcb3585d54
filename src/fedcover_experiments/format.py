"""Numbers as text, as the tables of all reports show them."""

from collections.abc import Sequence
from statistics import fmean, stdev


def signed(value: float, digits: int = 2) -> str:
    """Return a difference with its sign, which is a real minus if negative.

    >>> signed(-0.338), signed(0.001)
    ('−0.34', '0.00')
    """
    text = f"{value:+.{digits}f}".replace("-", "−")
    return text[1:] if float(text.replace("−", "-")) == 0 else text


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation, or the value itself if there is only one.

    >>> spread([97.0, 98.0]), spread([97.0])
    ('97.50 ± 0.71', '97.00')
    """
    return f"{fmean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"
