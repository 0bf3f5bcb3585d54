"""Tables in Markdown."""

from collections.abc import Mapping, Sequence


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as a table; cells are Markdown, and the keys of the first row are the heads of the columns.

    >>> print(markdown_table([{"policy": "WP", "accuracy": "**98.1**"}]))
    | policy | accuracy |
    |---|---|
    | WP | **98.1** |
    """
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])
