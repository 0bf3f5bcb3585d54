"""The report as files: one self-contained HTML page, and Markdown with figures beside it."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.report.elements import anchor, figure, prose, section_heading, table, text
from fedcover.report.figures import write_drawings
from fedcover.report.page import frame
from fedcover_experiments.markdown import markdown_table
from fedcover_experiments.paper.document import (
    PLAIN,
    TITLE,
    ClaimVerdict,
    Element,
    FigureGrid,
    Heading,
    Paragraph,
    Rows,
    document,
)
from fedcover_experiments.results import Results

PAGE, MARKDOWN, FIGURES = "index.html", "README.md", "figures"


def write_paper_report(results: Results, folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """Write ``index.html``, ``README.md`` and ``figures/`` into a folder; return the paths."""
    elements = document(results)
    drawn = [drawing for element in elements if isinstance(element, FigureGrid) for drawing in element.drawings]
    return [
        write_atomically(folder / PAGE, as_html(elements).encode()),
        write_atomically(folder / MARKDOWN, as_markdown(elements).encode()),
        *write_drawings(drawn, folder / FIGURES, formats),
    ]


def as_html(elements: Sequence[Element]) -> str:
    """Return the elements as one self-contained page."""
    opening = [f'<p class="over">fedcover paper report</p>\n<h1>{text(TITLE)}</h1>']
    return frame(TITLE, opening + [_html(element) for element in elements])


def _html(element: Element) -> str:
    match element:
        case Heading():
            return section_heading(element.text)
        case Paragraph():
            kind = f' class="{element.kind}"' if element.kind else ""
            return f"<p{kind}>{prose(element.text)}</p>"
        case ClaimVerdict():
            tag = f'<span class="tag {_kind(element.verdict)}">{text(element.verdict)}</span>'
            return (
                f'<section class="claim" id="{anchor(element.title)}">\n<h3>{text(element.title)} {tag}</h3>\n'
                f'<p class="about">The paper: {prose(element.statement)}</p>\n<p>{prose(element.finding)}</p>\n'
                f"{_html(element.comparisons) if element.comparisons else ''}\n</section>"
            )
        case Rows():
            grid = table(element.rows, element.label, element.marks, element.prose)
            return (
                f"<details>\n<summary>{text(element.label)}</summary>\n{grid}\n</details>" if element.folded else grid
            )
        case FigureGrid():
            return '<div class="figures">\n' + "\n".join(map(figure, element.drawings)) + "\n</div>"


def _kind(verdict: str) -> str:
    """Return the class of a claim's verdict, which decides its colour."""
    return {"holds": "confirmed", "fails": "opposite"}.get(re.split(r"\W", verdict)[0], "open")


def as_markdown(elements: Sequence[Element]) -> str:
    """Return the elements as Markdown; figures are files in the folder ``figures``."""
    opening = f"# {TITLE}\n\nWritten by `fedcover paper report`; [the same as one HTML page]({PAGE})."
    return "\n\n".join([opening, *map(_markdown, elements)]) + "\n"


def _markdown(element: Element) -> str:
    match element:
        case Heading():
            return f"## {element.text}"
        case Paragraph():
            return f"> {element.text}" if element.kind == "notice" else element.text
        case ClaimVerdict():
            claim = (
                f"### {element.title}: {element.verdict}\n\n"
                f"The paper: {_escaped(element.statement)}\n\n{_escaped(element.finding)}"
            )
            return f"{claim}\n\n{_markdown(element.comparisons)}" if element.comparisons else claim
        case Rows():
            return f"{element.label}:\n\n{markdown_table(_cells(element.rows, element.marks))}"
        case FigureGrid():
            return "\n\n".join(
                f"### {d.title}\n\n![{d.alt}]({FIGURES}/{d.name}.svg)\n\n{d.caption}" for d in element.drawings
            )


def _cells(rows: Sequence[Mapping[str, str]], marks: Mapping[tuple[int, str], str]) -> list[dict[str, str]]:
    """Return the rows with cells in Markdown; marked cells are bold."""
    return [
        {
            head: f"**{_escaped(cell)}**" if marks.get((number, head), PLAIN[0]) not in PLAIN else _escaped(cell)
            for head, cell in row.items()
        }
        for number, row in enumerate(rows)
    ]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")
