"""Numbers in documents are those of JSON files, and the files that collect numbers are what the results give."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.endtoend.documents import ROOT, tool

numbers, collect = tool("fill_numbers"), tool("collect_numbers")
SOURCES = {
    "a": {"seconds": 1.25, "rounds": [{"label": "first, slow", "s": 4}, {"label": "second", "s": 1}]},
    "b": {"x": {"gain": -2.5}, "y": {"gain": 0.5}},
}


def test_tables_of_the_reference_are_those_of_the_package() -> None:
    """They are part of the pages, which are also read without the site; `make docs` writes them."""
    assert tool("fill_tables").stale(write=False) == []
    settings = (ROOT / "docs/reference/settings.md").read_text()
    assert "`local.lr` = `0.01`" in settings
    assert "| `early_stopping` | " in settings
    without = "<!-- generated: codes -->\n\n## More\n\n<!-- generated: rooms -->\n<!-- /generated -->\n"
    assert "## More" in tool("fill_tables").filled(without)


def test_every_number_in_the_documents_is_that_of_its_source() -> None:
    assert numbers.stale(write=False) == []


@pytest.mark.parametrize("name", list(collect.FILES))
def test_collected_numbers_are_what_the_results_give(name: str) -> None:
    committed = json.loads(collect.path_of(name).read_text())
    assert flat(json.loads(collect.collected(name))) == pytest.approx(flat(committed), rel=1e-4)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of a JSON value that are numbers, by their paths; others become parts of paths."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, inner in items for key, leaf in flat(inner, f"{path}/{name}").items()}
    return {path: value} if isinstance(value, int | float) else {f"{path}={value}": 0}


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("a.seconds:.1f", "1.2"),
        ("100 * a.seconds:.0f", "125"),
        ('a.rounds["first, slow"].s / a.rounds["second"].s:.1f', "4.0"),
        ("a.rounds[1].label", "second"),
        ("1000 * a.rounds[0].s:,", "4,000"),
        ('min(each(b, "gain")):.1f', "−2.5"),
        ('abs(b.x.gain) + sum(each(a.rounds, "s"))', "7.5"),
        ('mean(each(b, "gain")) - len(a.rounds)', "−3.0"),
    ],
)
def test_expressions(expression: str, text: str) -> None:
    assert numbers.written(expression, SOURCES) == text


@pytest.mark.parametrize(
    "expression", ["a.minutes", "a.rounds[7].s", 'a.rounds["third"].s', "__import__('os')", "a.seconds ** 2", "a.("]
)
def test_an_expression_that_cannot_be_computed_is_named(expression: str) -> None:
    with pytest.raises(ValueError, match="cannot compute"):
        numbers.written(expression, SOURCES)


PAGE = """# Page

<!-- numbers: t = t.json -->
<!-- numbers: first = t.json#rows[0] -->

It takes <!--= t.seconds:.2f -->9.99<!--/--> s; the first row has
<!--= first.value -->0<!--/-->.

<!-- rows: t.rows as | {name} | {value / t.seconds:.1f} | -->

| name | value |
|---|---|
| old | 1 |

```text
<!--= not.a.number -->1<!--/-->
```
"""


def test_pages_are_filled_in_place() -> None:
    source = {"seconds": 0.5, "rows": [{"name": "one", "value": 1}, {"name": "two", "value": 2}]}
    once = numbers.filled(PAGE, lambda path: source)
    assert "takes <!--= t.seconds:.2f -->0.50<!--/--> s" in once
    assert "<!--= first.value -->1<!--/-->" in once
    assert "| one | 2.0 |\n| two | 4.0 |\n\n```text" in once
    assert "<!--= not.a.number -->1<!--/-->" in once  # code is left as it is
    assert numbers.filled(once, lambda path: source) == once


def test_readers_of_the_site_see_no_marks() -> None:
    shown = numbers.without_marks(PAGE)
    assert "It takes 9.99 s; the first row has\n0." in shown
    assert "| old | 1 |" in shown
    assert "<!--" not in shown.partition("```text")[0]


def test_a_stale_number_is_found_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    mark = "<!-- numbers: flower = benchmarks/results/flower.json -->\n"
    page.write_text(mark + "It takes <!--= flower.rounds[0].median:.2f -->0.01<!--/--> s.\n")
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    monkeypatch.setattr(numbers, "load", lambda path: json.loads((ROOT / path).read_text()))
    assert len(numbers.stale(write=False)) == 1
    assert "0.01" in page.read_text()
    assert len(numbers.stale(write=True)) == 1
    assert numbers.stale(write=False) == []
