"""The style sheet and the figures agree on the colours, and both themes can be read."""

import re
from importlib import resources

import pytest

from fedcover.report.style import COLOURS

CSS = resources.files("fedcover.report").joinpath("page.css").read_text(encoding="utf-8")
LIGHT, DARK = (
    dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_light_theme_is_that_of_the_figures() -> None:
    assert {name: LIGHT[name] for name in COLOURS} == COLOURS
    assert set(DARK) == set(LIGHT)
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_lines_stand_out(theme: dict[str, str]) -> None:
    for back in ("page", "card"):
        assert contrast(theme["ink"], theme[back]) >= 7
        assert contrast(theme["muted"], theme[back]) >= 4.5
        assert contrast(theme["link"], theme[back]) >= 4.5
    assert contrast(theme["ink"], theme["warn-back"]) >= 7
    for name in COLOURS:
        if name.startswith("series") or name == "warn":
            assert contrast(theme[name], theme["card"]) >= 3.9, name
