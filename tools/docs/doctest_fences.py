"""An extension of griffe: show doctests of docstrings as code."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^|\n\n)(>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class DoctestFences(griffe.Extension):
    """Puts paragraphs of a docstring that begin with ``>>>`` into fenced blocks, unless a section has them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(match: re.Match[str]) -> str:
    return f"\n\n```pycon\n{match[1].rstrip()}\n```"
