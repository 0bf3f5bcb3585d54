"""The elements of a page as HTML; ``text``, ``prose`` and ``attribute`` escape everything that comes from a run."""

import html
import re
from collections.abc import Collection, Mapping, Sequence

from fedcover.report.figures import Drawing, LegendEntry
from fedcover.report.style import dashes, without_legend
from fedcover.report.svg import inline_svg


def text(plain: object) -> str:
    """Return any text escaped for HTML, with the index of Gamma_min as a subscript."""
    return html.escape(str(plain)).replace("Γmin", "Γ<sub>min</sub>")


def prose(plain: str) -> str:
    """Return a sentence escaped for HTML, without line breaks between a number and its percent sign."""
    return re.sub(r"(?<=\d) (?=%)", "\u00a0", text(plain))


def attribute(plain: object) -> str:
    """Return any text escaped for a double-quoted attribute."""
    return html.escape(str(plain))


def section_heading(title: str) -> str:
    """Return the heading of a section, with an anchor that links to it."""
    return f'<h2 id="{anchor(title)}">{text(title)} {_anchor_link(title)}</h2>'


def anchor(title: str) -> str:
    """Return the id of the heading with this title.

    >>> anchor("The paper's claims and our results")
    'the-paper-s-claims-and-our-results'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


def _anchor_link(title: str) -> str:
    return f'<a class="anchor" href="#{anchor(title)}" aria-label="Link to {attribute(title)}">#</a>'


def contents(parts: Sequence[str]) -> str:
    """Return links to the sections of a page; "" if there are only a few."""
    heads = re.findall(r'<h2 id="([^"]+)">(.*?) <a class="anchor"', "\n".join(parts))
    if len(heads) < 4:
        return ""
    items = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in heads)
    return f'<nav class="contents" aria-label="Contents"><ul>{items}</ul></nav>'


def table(
    rows: Sequence[Mapping[str, str]],
    label: str,
    marks: Mapping[tuple[int, str], str] | None = None,
    words: Collection[str] = (),
    keys: Sequence[str] = (),
    titles: Mapping[tuple[int, str], str] | None = None,
) -> str:
    """Return rows as a table in a box that scrolls by itself; a script makes it sortable.

    Args:
        rows: The rows, each from header to cell.
        label: Description for screen readers.
        marks: Classes of single cells by row number and header.
        words: Headers of columns with prose; the others are numbers.
        keys: Small drawings before the first cells.
        titles: What is shown when the pointer rests on single cells, by row number and header.
    """

    def kind(header: str, mark: str = "", title: str = "") -> str:
        names = " ".join(name for name in ("words" if header in words else "", mark) if name)
        return (f' class="{names}"' if names else "") + (f' title="{attribute(title)}"' if title else "")

    heads = "".join(f'<th scope="col"{kind(header)}>{text(header)}</th>' for header in rows[0])
    body = []
    for number, row in enumerate(rows):
        (_, first), *rest = row.items()
        shown = [(kind(h, *(by.get((number, h), "") for by in (marks or {}, titles or {}))), cell) for h, cell in rest]
        columns = [f"<td{opening}>{text(cell)}</td>" for opening, cell in shown]
        key = keys[number] if keys else ""
        body.append(f'<tr><th scope="row">{key}{text(first)}</th>{"".join(columns)}</tr>')
    tall = " long" if len(rows) > 20 else ""
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{attribute(label)}">\n<table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(body) + "\n</tbody>\n</table>\n</div>"
    )


def key(style: int) -> str:
    """Return a line style as a small drawing."""
    strokes = " ".join(f"{2 * length:g}" for length in dashes(style))
    dash = f' stroke-dasharray="{strokes}"' if strokes else ""
    stroke = f'stroke="var(--series-{style % 8 + 1})"{dash}'
    return f'<svg class="key" viewBox="0 0 30 10" aria-hidden="true"><path d="M0 5H30" {stroke}/></svg>'


def legend(entries: Sequence[LegendEntry], shared: bool = False) -> str:
    """Return the series of one figure, or of all figures of a page; a script makes them buttons."""
    items = [
        f'<li data-name="{attribute(entry.series)}">{key(entry.style)}<span>{text(entry.label)}</span></li>'
        for entry in entries
    ]
    kind = "legend shared" if shared else "legend"
    return f'<ul class="{kind}" aria-label="Legend">{"".join(items)}</ul>'


def figure(drawing: Drawing) -> str:
    """Return one figure with its title, legend and caption, and a place for its buttons to save."""
    drawn = drawing.draw()
    legends = len(drawn.legends)
    shown = without_legend(drawn)
    cut = " data-legend" if len(shown.legends) < legends else ""
    svg = inline_svg(shown, re.sub(r"[^a-z0-9-]", "-", drawing.name), attribute(drawing.alt))
    whole = f' data-series="{attribute(drawing.series)}"' if drawing.series else ""
    own = f"{legend(drawing.legend)}\n" if drawing.legend else ""
    return (
        f'<figure id="figure-{attribute(drawing.name)}"{whole}{cut}>\n<div class="head"><h3>{text(drawing.title)}</h3>'
        f'<span class="get" data-name="{attribute(drawing.name)}"></span></div>\n'
        f"{svg}\n{own}<figcaption>{prose(drawing.caption)}</figcaption>\n</figure>"
    )
