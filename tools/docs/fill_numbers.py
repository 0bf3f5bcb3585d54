"""Fill numbers from JSON files into Markdown.

A page names its sources once, and every number carries the expression that it comes from::

    <!-- numbers: flower = benchmarks/results/flower.json -->
    A round takes <!--= flower.rounds[0].median:.2f -->1.72<!--/--> s.

The rows of a whole table come from a list, one row for each object, by a template above the table::

    <!-- rows: flower.rounds as | {label} | {median:.2f} | -->

    | | seconds |
    |---|---|
    | Flower, FedAvg | 1.72 |

All marks are HTML comments, so readers see only the numbers. An expression has attributes and items of the JSON value,
numbers, ``+ - * /``, and ``min``, ``max``, ``mean``, ``sum``, ``len`` and ``abs``. A list of objects is also indexed
by the name, label or code of an object, as in ``flower.rounds["Flower, FedAvg"].median``. ``each(flower.rounds,
"median")`` is one field of all of them. What follows the last colon is a format as in Python's f-strings. A source may
be a part of a file: ``<!-- numbers: rounds = FILE.json#rounds -->``, or ``FILE.json#["a-name"].rounds``.

``python tools/docs/fill_numbers.py`` fills every page in place; with ``--check`` it reports pages that would change.
"""

import argparse
import ast
import functools
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from repository import ROOT, outside_fences

SOURCE = re.compile(r"^<!-- numbers: (\w+) = ([^\s#]+)(?:#(.+?))? -->\n", re.MULTILINE)
NUMBER = re.compile(r"<!--= (.+?) -->(.*?)<!--/-->", re.DOTALL)
ROWS = re.compile(r"^(<!-- rows: (\S+) as (\|.+\|) -->\n)(\n.*\n\|[-|]+\n)((?:\|.*\n)*)", re.MULTILINE)
FIELD = re.compile(r"\{(.+?)\}")
FORMAT = re.compile(r"^(.*?)(?::([^:\[\]\"'()]*))?$", re.DOTALL)
NAMES = ("name", "label", "code")
"""Keys whose values name the objects of a list."""
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
FUNCTIONS: dict[str, Callable[[Any], Any]] = {"min": min, "max": max, "mean": fmean, "sum": sum, "len": len, "abs": abs}
"""Functions of one list, or of the values of one object; ``abs`` of one number."""


def value_of(expression: str, sources: Mapping[str, Any]) -> Any:
    """Return the value of an expression over JSON values.

    >>> value_of('a.rounds["second"].s / a.rounds[0].s', {"a": {"rounds": [{"s": 2}, {"name": "second", "s": 3}]}})
    1.5
    """
    return _evaluate(ast.parse(expression.strip(), mode="eval").body, sources)


def _evaluate(node: ast.expr, sources: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Name(name):
            return sources[name]
        case ast.Attribute(inner, name):
            return _evaluate(inner, sources)[name]
        case ast.Subscript(inner, key):
            return _item(_evaluate(inner, sources), _evaluate(key, sources))
        case ast.UnaryOp(ast.USub(), inner):
            return -_evaluate(inner, sources)
        case ast.BinOp(left, kind, right):
            return OPERATORS[type(kind)](_evaluate(left, sources), _evaluate(right, sources))
        case ast.Call(ast.Name(name), [inner], []):
            value = _evaluate(inner, sources)
            return FUNCTIONS[name](list(value.values()) if isinstance(value, dict) else value)
        case ast.Call(ast.Name("each"), [inner, ast.Constant(key)], []):
            value = _evaluate(inner, sources)
            return [item[key] for item in (value.values() if isinstance(value, dict) else value)]
    raise ValueError(f"'{ast.unparse(node)}' is not part of this language; see tools/docs/fill_numbers.py")


def _item(values: Any, key: Any) -> Any:
    if isinstance(values, list) and isinstance(key, str):
        (item,) = (one for one in values if key in [one.get(name) for name in NAMES])
        return item
    return values[key]


def written(expression: str, sources: Mapping[str, Any]) -> str:
    """Return the text of a number: the value of the expression in its format."""
    match = FORMAT.match(expression)
    assert match is not None
    try:
        value = value_of(match[1], sources)
        return value if isinstance(value, str) else format(value, match[2] or "").replace("-", "−")
    except (KeyError, IndexError, TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"cannot compute '{expression}': {error!r}") from error


def filled(text: str, load: Callable[[str], Any]) -> str:
    """Return a Markdown text with every number written again; ``load`` reads a source by its path.

    >>> print(filled("<!-- numbers: a = a.json -->\\nIt is <!--= a.b:.1f -->?<!--/-->.", lambda path: {"b": 0.25}))
    <!-- numbers: a = a.json -->
    It is <!--= a.b:.1f -->0.2<!--/-->.
    """
    sources = {}
    for name, path, part in SOURCE.findall(text):
        dot = "" if part.startswith("[") else "."
        sources[name] = value_of(f"file{dot}{part}", {"file": load(path)}) if part else load(path)

    def number(match: re.Match[str]) -> str:
        return f"<!--= {match[1]} -->{written(match[1], sources)}<!--/-->"

    def table(match: re.Match[str]) -> str:
        mark, items, template, head, _ = match.groups()
        return mark + head + "".join(row(template, sources | item) for item in value_of(items, sources))

    def row(template: str, values: Mapping[str, Any]) -> str:
        return FIELD.sub(lambda field: written(field[1], values), template) + "\n"

    parts = ((ROWS.sub(table, NUMBER.sub(number, part)) if prose else part) for part, prose in outside_fences(text))
    return "".join(parts)


def without_marks(text: str) -> str:
    """Return a Markdown text with its numbers and without the comments that say where they come from."""

    def bare(part: str) -> str:
        return SOURCE.sub("", ROWS.sub(r"\4\5", NUMBER.sub(r"\2", part)))

    return "".join(bare(part) if prose else part for part, prose in outside_fences(text))


@functools.cache
def load(path: str) -> Any:
    """Return the content of a JSON file of the repository."""
    return json.loads((ROOT / path).read_text())


def pages() -> list[Path]:
    """Return the Markdown files that may have numbers: those at the root and in ``docs/``."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def stale(write: bool) -> list[str]:
    """Return the files whose numbers are not those of their sources, one line for each; with ``write`` fix them."""
    lines = []
    for path in pages():
        before = path.read_text()
        try:
            after = filled(before, load)
        except ValueError as error:
            raise ValueError(f"{path.relative_to(ROOT)}: {error}") from error
        if after != before:
            lines.append(f"{path.relative_to(ROOT)}: {_first_change(before, after)}")
            if write:
                path.write_text(after)
    return lines


def _first_change(before: str, after: str) -> str:
    lines = zip_longest(before.splitlines(), after.splitlines(), fillvalue="")
    old, new = next((old, new) for old, new in lines if old != new)
    return f"{old.strip()!r} should be {new.strip()!r}"


def main() -> None:
    """Fill or check all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    arguments = parser.parse_args()
    lines = stale(write=not arguments.check)
    print("\n".join(lines) if lines else "all numbers are those of their sources")
    sys.exit(1 if lines and arguments.check else 0)


if __name__ == "__main__":
    main()
