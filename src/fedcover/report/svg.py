"""Figures as bytes: SVG elements that follow a page's theme, and files of their own."""

import html
import io
import json
import re

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedcover.report.plot_data import plot_data
from fedcover.report.style import COLOURS, SERIES_MARK, figure_style

FORMATS = ("svg", "png", "pdf")
_LINES = re.compile(r'd="(?:[ML] -?[\d.]+ -?[\d.]+\s*|z\s*)+"')
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
    element outside the page has the light colours. The element's metadata hold the values of curves and maps.

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
    data = json.dumps(plot_data(figure), ensure_ascii=False, separators=(",", ":"))
    text = re.sub(r'style="[^"]*"', lambda match: _themed(match[0]), text)
    text = re.sub(r">\s+<", "><", text).strip()
    width, height = figure.get_size_inches() * 72
    size = f"0 0 {width:g} {height:g}"
    root = f'<svg viewBox="{size}" role="img" aria-label="{alt}" stroke-linejoin="round" font-family="{_FONTS}">'
    return f"{root}<metadata>{html.escape(data, quote=False)}</metadata>{text[text.index('>') + 1 :]}"


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
    """Return a drawing whose coordinates are short: lines relative and in tenths of a point, others in hundredths.

    >>> _with_short_numbers('<path d="M 12.345678 2 L 0.5 7.000001"/><path d="M 1 2 Q 3.14159 1 0 0"/>')
    '<path d="M12.3 2l-11.8 5"/><path d="M 1 2 Q 3.14 1 0 0"/>'
    """

    def rounded(attribute: re.Match[str]) -> str:
        if _LINES.fullmatch(attribute[0]):
            return f'd="{_relative(attribute[0])}"'
        return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{round(float(number[0]), 2):g}", attribute[0])

    return re.sub(r'\b(?:d|x|y)="[^"]*"', rounded, text)


def _relative(path: str) -> str:
    """Return a path of straight lines with relative coordinates, which are differences of rounded absolute ones."""
    parts: list[str] = []
    x = y = 0
    for command, across, down in re.findall(r"([ML]) (\S+) ([^\s\"]+)|z", path):
        if not command:
            parts.append("z")
            continue
        new = round(10 * float(across)), round(10 * float(down))
        if command == "M":
            parts.append(f"M{new[0] / 10:g} {new[1] / 10:g}")
        else:
            start = " " if parts and parts[-1][0] in "l " else "l"
            parts.append(f"{start}{(new[0] - x) / 10:g} {(new[1] - y) / 10:g}")
        x, y = new
    return "".join(parts)


def _with_unique_ids(text: str, name: str) -> str:
    """Return a drawing with only the ids that it refers to, each as ``name-number``; series become attributes."""
    used = dict.fromkeys(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    ids = {old: f"{name}-{number}" for number, old in enumerate(used, 1)}

    def renamed(match: re.Match[str]) -> str:
        if match[1].startswith(SERIES_MARK):
            return f' data-series="{match[1].removeprefix(SERIES_MARK)}"'
        return f' id="{ids[match[1]]}"' if match[1] in ids else ""

    text = re.sub(r' id="([^"]*)"', renamed, text)
    return re.sub(r'(url\(#|href="#)([^)"]+)', lambda match: match[1] + ids[match[2]], text)
