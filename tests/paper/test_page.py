"""The report on the paper: nothing is missing, and docs/ has what the committed results give."""

import re
from pathlib import Path

import pytest

from fedcover.report.format import MISSING
from fedcover_experiments.paper.authors_script import VARIANTS
from fedcover_experiments.paper.compare import DEPARTURES, accuracy_rows, cost_rows, departure_rows
from fedcover_experiments.paper.document import FigureGrid, document
from fedcover_experiments.paper.page import as_html, as_markdown
from fedcover_experiments.paper.published import tables
from fedcover_experiments.results import Results, load_all

DOCS = Path(__file__).parents[2] / "docs" / "paper"


@pytest.fixture(scope="module")
def results() -> Results:
    return load_all(sorted((DOCS / "results").glob("*.json")))


@pytest.mark.parametrize("key", list(tables()))
def test_every_row_has_our_mean_deviation_and_difference(key: str, results: Results) -> None:
    table = tables()[key]
    rows, _ = accuracy_rows(table, results)
    assert len(rows) == len(table.rows)
    for row in rows:
        assert MISSING not in row.values()
        for head, cell in row.items():
            if head.endswith("ours"):
                mean, deviation = map(float, cell.split(" ± "))
                published = float(row[head.replace("ours", "paper")])
                difference = float(row[head.replace("ours", "difference")].replace("−", "-"))
                assert 10 < mean < 100
                assert 0 < deviation < 5
                assert difference == pytest.approx(mean - published, abs=0.0101)


def test_costs_are_beside_the_printed_ones() -> None:
    rows, marks = cost_rows(tables()["table1"])
    star = next(row for row in rows if row["row"] == "*WP-M1")
    assert (star["MACs"], star["MACs: paper"], star["bytes of the parameters"]) == ("135,280", "135.5K", "541,960")
    assert (rows.index(star), "MACs: paper") in marks
    assert (rows.index(star), "Γmin: paper") not in marks
    assert float(star["FLOPs of a step, batch of 10"].removesuffix(" M")) == pytest.approx(5.448, abs=0.01)


def test_doubtful_published_accuracies_are_marked(results: Results) -> None:
    rows, marks = accuracy_rows(tables()["table1"], results)
    marked = {(rows[number]["row"], head) for number, head in marks}
    assert ("*NP-S1", "non-IID, global: paper") in marked
    assert ("*NP-M1", "IID: paper") not in marked


def test_only_all_departures_together_give_the_published_column(results: Results) -> None:
    assert list(DEPARTURES) == list(VARIANTS)
    mean, most = departure_rows("iid", results)[-2:]
    far = {head: float(cell) for head, cell in mean.items() if head in DEPARTURES.values()}
    assert float(most["all four"]) < 0.5
    assert far["all four"] < 0.25
    assert all(distance > 1 for head, distance in far.items() if head != "all four")


def test_the_page_in_docs_is_what_the_results_give(results: Results) -> None:
    elements = document(results)
    assert (DOCS / "README.md").read_text() == as_markdown(elements)
    assert _without_drawings((DOCS / "index.html").read_text()) == _without_drawings(as_html(elements))
    drawn = {drawing.name for element in elements if isinstance(element, FigureGrid) for drawing in element.drawings}
    assert len(drawn) == 30
    assert {path.name for path in (DOCS / "figures").iterdir()} == {
        f"{n}.{end}" for n in drawn for end in ("svg", "png")
    }


def test_a_report_of_a_few_rows(results: Results) -> None:
    few = {run: o for run, o in results.outcomes.items() if run.experiment.code == "1111223344" and run.seed < 2}
    elements = document(Results(results.rounds, results.provenance, few))
    text = as_markdown([element for element in elements if not isinstance(element, FigureGrid)])
    assert "| \\*WP-M1 | 1111223344 | 97." in text
    assert f"| WP-M2 | 1111444444 | {MISSING} |" in text


def _without_drawings(page: str) -> str:
    """Return the page without the insides of its drawings, whose last digits may differ between machines.

    Their alternative texts, which have the ends of the curves, stay.
    """
    return re.sub(r"(<svg\b[^>]*>).*?</svg>", r"\1", page, flags=re.DOTALL)
