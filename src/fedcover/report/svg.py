"""Figures as bytes: SVG elements that follow a page's theme, and files of their own."""

import io
import re

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedcover.report.style import COLOURS, figure_style

FORMATS = ("svg", "png", "pdf")
_FONTS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def file_bytes(figure: Figure, kind: str) -> bytes:
    """Return the figure as a file of one of ``FORMATS``, on white; equal figures give equal bytes."""
    metadata: dict[str, None] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    buffer = io.BytesIO()
    with figure_style():
        figure.savefig(buffer, format=kind, dpi=200, facecolor="white", metadata=metadata)
    content = buffer.getvalue()
    if kind == "svg":
        return _with_short_numbers(content.decode()).encode()
    return _with_palette(content) if kind == "png" else content


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """Return the figure as an ``<svg>`` element for an HTML page.

    Text stays text. A named colour becomes ``var(--name, #light)``: the page's theme decides, and a copy of the
    element outside the page has the light colours.

    Args:
        figure: The figure to draw.
        name: Prefix of the ids in the element, unique on the page.
        alt: Description for readers who cannot see the figure, already escaped.
    """
    buffer = io.StringIO()
    with figure_style():
        matplotlib.rcParams["svg.fonttype"] = "none"
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # the root element sets the font
    text = _with_unique_ids(_with_short_numbers(text), name)
    text = re.sub(r'style="[^"]*"', lambda match: _themed(match[0]), text)
    text = re.sub(r">\s+<", "><", text).strip()
    width, height = figure.get_size_inches() * 72
    size = f"0 0 {width:g} {height:g}"
    root = f'<svg viewBox="{size}" role="img" aria-label="{alt}" stroke-linejoin="round" font-family="{_FONTS}">'
    return root + text[text.index(">") + 1 :]


def _with_palette(png: bytes) -> bytes:
    """Return the same picture with a palette, which takes a quarter of the bytes."""
    smaller = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
            smaller, "PNG", optimize=True, dpi=picture.info["dpi"]
        )
    return smaller.getvalue()


def _themed(style: str) -> str:
    """Return a style attribute with its named colours as variables of the page's theme."""
    for variable, value in COLOURS.items():
        style = style.replace(value, f"var(--{variable}, {value})")
    return style


def _with_short_numbers(text: str) -> str:
    """Return a drawing whose coordinates are rounded to a hundredth of a point.

    >>> _with_short_numbers('<path d="M 12.345678 2 L 0.5 7.000001"/>')
    '<path d="M 12.35 2 L 0.5 7"/>'
    """

    def rounded(attribute: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2):g}", attribute[0])

    return re.sub(r'\b(?:d|x|y)="[^"]*"', rounded, text)


def _with_unique_ids(text: str, name: str) -> str:
    """Return a drawing with only the ids that it refers to, each as ``name-number``."""
    used = dict.fromkeys(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    ids = {old: f"{name}-{number}" for number, old in enumerate(used, 1)}
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{ids[match[1]]}"' if match[1] in ids else "", text)
    return re.sub(r'(url\(#|href="#)([^)"]+)', lambda match: match[1] + ids[match[2]], text)
