"""The report as files: one page of HTML that needs nothing else, and Markdown with figures beside it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedcover._files import write_atomically
from fedcover.report.figures import write_drawings
from fedcover.report.page import frame
from fedcover.report.sections import figure, prose, table, text
from fedcover_experiments.paper.document import TITLE, ClaimVerdict, Heading, Part, Pictures, Rows, Words, document
from fedcover_experiments.results import Results

PAGE, MARKDOWN, FIGURES = "index.html", "README.md", "figures"


def write_paper_report(results: Results, folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
    """The files written into a folder: ``index.html``, ``README.md`` and ``figures/``."""
    parts = document(results)
    drawn = [drawing for part in parts if isinstance(part, Pictures) for drawing in part.drawings]
    return [
        write_atomically(folder / PAGE, as_html(parts).encode()),
        write_atomically(folder / MARKDOWN, as_markdown(parts).encode()),
        *write_drawings(drawn, folder / FIGURES, formats),
    ]


def as_html(parts: Sequence[Part]) -> str:
    """The parts as one self-contained page."""
    opening = [f'<p class="over">fedcover paper report</p>\n<h1>{text(TITLE)}</h1>']
    return frame(TITLE, opening + [_html(part) for part in parts])


def _html(part: Part) -> str:
    match part:
        case Heading():
            return f"<h2>{text(part.text)}</h2>"
        case Words():
            kind = f' class="{part.kind}"' if part.kind else ""
            return f"<p{kind}>{prose(part.text)}</p>"
        case ClaimVerdict():
            return (
                f'<section class="claim">\n<h3>{text(part.title)} <span class="tag">{text(part.verdict)}</span></h3>\n'
                f'<p class="about">The paper: {prose(part.says)}</p>\n<p>{prose(part.finding)}</p>\n'
                f"{_html(part.behind) if part.behind else ''}\n</section>"
            )
        case Rows():
            made = table(part.rows, part.label, part.marks, part.prose)
            return f"<details>\n<summary>{text(part.label)}</summary>\n{made}\n</details>" if part.folded else made
        case Pictures():
            return '<div class="figures">\n' + "\n".join(map(figure, part.drawings)) + "\n</div>"


def as_markdown(parts: Sequence[Part]) -> str:
    """The parts as Markdown; figures are files in the folder ``figures``."""
    opening = f"# {TITLE}\n\nMade by `fedcover paper report`; [the same as one page]({PAGE})."
    return "\n\n".join([opening, *map(_markdown, parts)]) + "\n"


def _markdown(part: Part) -> str:
    match part:
        case Heading():
            return f"## {part.text}"
        case Words():
            return f"> {part.text}" if part.kind == "notice" else part.text
        case ClaimVerdict():
            said = f"### {part.title}: {part.verdict}\n\nThe paper: {_escaped(part.says)}\n\n{_escaped(part.finding)}"
            return f"{said}\n\n{_markdown(part.behind)}" if part.behind else said
        case Rows():
            return f"{part.label}:\n\n{_grid(part.rows, part.marks)}"
        case Pictures():
            return "\n\n".join(
                f"### {d.title}\n\n![{d.alt}]({FIGURES}/{d.name}.svg)\n\n{d.caption}" for d in part.drawings
            )


def _grid(rows: Sequence[Mapping[str, str]], marks: Mapping[tuple[int, str], str]) -> str:
    """A table of Markdown; marked cells are bold."""
    heads = list(rows[0])
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for number, row in enumerate(rows):
        cells = [_escaped(cell) for cell in row.values()]
        cells = [f"**{cell}**" if (number, head) in marks else cell for head, cell in zip(heads, cells, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|").replace("*", "\\*")
