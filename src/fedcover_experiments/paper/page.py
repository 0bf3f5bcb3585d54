"""The report as files: one self-contained HTML page, and Markdown with figures beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.report.figures import write_drawings
from fedcover.report.page import frame
from fedcover.report.sections import figure, prose, table, text
from fedcover_experiments.markdown import markdown_table
from fedcover_experiments.paper.document import (
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
            return f"<h2>{text(element.text)}</h2>"
        case Paragraph():
            kind = f' class="{element.kind}"' if element.kind else ""
            return f"<p{kind}>{prose(element.text)}</p>"
        case ClaimVerdict():
            return (
                '<section class="claim">\n'
                f'<h3>{text(element.title)} <span class="tag">{text(element.verdict)}</span></h3>\n'
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
        {head: f"**{_escaped(cell)}**" if (number, head) in marks else _escaped(cell) for head, cell in row.items()}
        for number, row in enumerate(rows)
    ]


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")
