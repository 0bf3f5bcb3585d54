"""Text from another machine, for a line of a log or a record."""

from fedcover.deploy.wire.frame import short_repr
from fedcover.report.loading import printable


def one_line(text: object, limit: int = 300) -> str:
    """Return untrusted text as one line of printable characters of limited length.

    >>> one_line("a\\n\\x1b[31mb" + "c" * 400, limit=8)
    'a [31mbc...'
    """
    if not isinstance(text, str | Exception):
        text = short_repr(text)  # a list of a million numbers would first become a text
    line = printable(str(text)[: 4 * limit])
    return line if len(line) <= limit else line[:limit] + "..."
