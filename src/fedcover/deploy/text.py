"""Text from another machine, for a line of a log or a record."""

from fedcover.report.loading import printable


def one_line(text: object, limit: int = 300) -> str:
    """Return untrusted text as one line of printable characters of limited length.

    >>> one_line("a\\n\\x1b[31mb" + "c" * 400, limit=8)
    'a [31mbc...'
    """
    line = printable(str(text))
    return line if len(line) <= limit else line[:limit] + "..."
