"""Figures as bytes: SVG that follows a page's theme, and files that stand alone."""

import io
import re

import matplotlib
from matplotlib.figure import Figure
from PIL import Image

from fedcover.report.style import COLOURS, look

FORMATS = ("svg", "png", "pdf")
MANY = 20
"""Points from which on a path is a curve."""
_FONTS = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def file_bytes(figure: Figure, kind: str) -> bytes:
    """The figure as a file of the format, on white; equal figures give equal bytes."""
    metadata: dict[str, None] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
    buffer = io.BytesIO()
    with look():
        figure.savefig(buffer, format=kind, dpi=200, facecolor="white", metadata=metadata)
    made = buffer.getvalue()
    if kind == "svg":
        made = re.sub(r'\bd="([^"]*)"', lambda found: f'd="{_round(found[1])}"', made.decode()).encode()
    return _few_colours(made) if kind == "png" else made


def _few_colours(png: bytes) -> bytes:
    """The same picture with a palette: a quarter of the bytes."""
    smaller = io.BytesIO()
    with Image.open(io.BytesIO(png)) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(
            smaller, "PNG", optimize=True, dpi=picture.info["dpi"]
        )
    return smaller.getvalue()


def inline_svg(figure: Figure, name: str, alt: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page.

    Text stays text; named colours become ``var(--name, #light)``, so the page's theme decides and a copy of the
    element alone is light; ids start with ``name``; numbers are cut to a hundredth of a point.
    ``alt`` must already be escaped.
    """
    buffer = io.StringIO()
    with look():
        matplotlib.rcParams["svg.fonttype"] = "none"
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style\b.*?</style>|<defs>\s*</defs>", "", text, flags=re.DOTALL)
    text = _without_bare_groups(_own_ids(_slim(text), name))
    text = re.sub(r'style="[^"]*"', lambda found: _themed(found[0]), text)
    width, height = figure.get_size_inches() * 72
    size = f"0 0 {width:g} {height:g}"
    root = f'<svg viewBox="{size}" role="img" aria-label="{alt}" stroke-linejoin="round" font-family="{_FONTS}">'
    return root + text[text.index(">") + 1 :]


def _themed(style: str) -> str:
    for variable, value in COLOURS.items():
        style = style.replace(value, f"var(--{variable}, {value})")
    return style


def _slim(text: str) -> str:
    """The same drawing in fewer characters."""
    text = re.sub(r"\btransform=\"rotate\(-0 [^)]*\)\"", "", text)
    text = re.sub(r"base64,\s+", "base64,", text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)  # it is said once, for all of the drawing
    text = re.sub(r'\b(d|x|y)="([^"]*)"', lambda found: f'{found[1]}="{_relative(_round(found[2]))}"', text)
    text = re.sub(r">\s+<", "><", text).strip().replace(" />", "/>")
    return text.replace("<g/>", "").replace("<defs></defs>", "")


def _round(numbers: str) -> str:
    short = re.sub(r"-?\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), numbers)
    return re.sub(r"\s*\n\s*", "", re.sub(r"(?<=\d)\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+(?=[-\d])", "", short))


def _relative(path: str) -> str:
    """A path of straight lines by its steps instead of its points; any other as it is.

    Steps are differences of the rounded points, so that nothing adds up. Curves of very many points are rounded to a
    tenth of a point, which no screen shows.

    >>> _relative("M10 20L12.5 20.5L12 21L10 20z"), _relative("M0 0Q1 1 2 2"), _relative("12.5")
    ('M10 20l2.5.5-.5.5-2-1z', 'M0 0Q1 1 2 2', '12.5')
    """
    if not re.fullmatch(r"(M-?[\d.]+ -?[\d.]+(L-?[\d.]+ -?[\d.]+)*z?)+", path):
        return path
    unit = 10 if path.count("L") > MANY else 100
    made, before, x, y = "", "", 0, 0
    for kind, *ends in re.findall(r"([MLz])(?:(-?[\d.]+) (-?[\d.]+))?", path):
        if kind == "z":
            made, before = made + "z", "z"
            continue
        to_x, to_y = (round(unit * float(end)) for end in ends)
        step = (to_x, to_y) if kind == "M" else (to_x - x, to_y - y)
        made += (" " if before == kind == "L" else {"M": "M", "L": "l"}[kind]) + " ".join(
            _short(part / unit) for part in step
        )
        before, x, y = kind, to_x, to_y
    # A sign begins a number, and so does a second point.
    return re.sub(r"(\.\d+) (?=\.)", r"\1", made.replace(" -", "-"))


def _short(number: float) -> str:
    """A number, to two decimals, in as few characters as can be."""
    text = f"{number:.2f}".rstrip("0").rstrip(".")
    return re.sub(r"^(-?)0(?=\.)", r"\1", text)


def _own_ids(text: str, name: str) -> str:
    """The drawing with only the ids that something refers to, each as ``name-number``."""
    used = dict.fromkeys(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    fresh = {old: f"{name}-{number}" for number, old in enumerate(used, 1)}
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{fresh[found[1]]}"' if found[1] in fresh else "", text)
    return re.sub(r'(url\(#|href="#)([^)"]+)', lambda found: found[1] + fresh[found[2]], text)


def _without_bare_groups(text: str) -> str:
    """The drawing without groups that say nothing.

    >>> _without_bare_groups('<g><g id="a"><g><path/></g></g></g>')
    '<g id="a"><path/></g>'
    """
    told: list[bool] = []

    def kept(tag: re.Match[str]) -> str:
        if tag[0] != "</g>":
            told.append(tag[0] != "<g>")
            return tag[0] if told[-1] else ""
        return "</g>" if told.pop() else ""

    return re.sub(r"<g(?: [^>]*)?(?<!/)>|</g>", kept, text)
