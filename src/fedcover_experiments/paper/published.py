"""The paper's tables as it printed them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from fedcover_experiments.runner import MODELS

COLUMNS = {
    "gamma_min": "Γmin",
    "parameters": "parameters",
    "macs": "MACs",
    "macs_k": "MACs, K",
    "space": "space at 8 B",
    "space_k": "space at 8 B, K",
    "ratio": "ratio",
    "parameters_ratio": "ratio of parameters",
    "macs_ratio": "ratio of MACs",
    "space_ratio": "ratio of space",
    "iid": "IID",
    "non_iid_global": "non-IID, global",
    "non_iid_local": "non-IID, local",
}
"""The titles of the paper's columns."""


@dataclass(frozen=True)
class Row:
    """One row: the policy and the code of a federation, and the cells that the paper printed for it."""

    name: str
    """The paper's nickname, such as *WP-M1, or the code where it has none."""
    code: str
    policy: str
    printed: Mapping[str, str]
    """All other cells, as text, by column."""


@dataclass(frozen=True)
class Table:
    """One of the paper's tables."""

    key: str
    source: str
    title: str
    data: str
    rows: tuple[Row, ...]

    @property
    def model(self) -> str:
        """The model of this table."""
        return MODELS[self.data]


@cache
def tables() -> dict[str, Table]:
    """Return all tables, by the names that ``fedcover paper`` uses.

    >>> list(tables())
    ['table1', 'table2', 'mnist-wp', 'mnist-np', 'mnist-fs', 'cifar-wp', 'cifar-fs']
    """
    with files("fedcover_experiments.paper").joinpath("published.toml").open("rb") as file:
        contents = tomllib.load(file)
    return {key: _table(key, **content) for key, content in contents.items()}


def number(text: str) -> float:
    """Return a printed cell as a number; K stands for thousands and M for millions.

    >>> number("143.12K"), number("0.90")
    (143120.0, 0.9)
    """
    unit = {"K": 1e3, "M": 1e6}.get(text[-1], 1.0)
    return round(float(text.rstrip("KM")) * unit, 6)


def agrees(text: str, value: float) -> bool:
    """Return whether a printed cell shows this value, rounded or truncated to the printed digits.

    >>> agrees("0.62", 0.6297), agrees("0.63", 0.6297), agrees("135.5K", 135280)
    (True, True, False)
    """
    unit = {"K": 1e3, "M": 1e6}.get(text[-1], 1.0)
    digits = len(text.rstrip("KM").partition(".")[2])
    return abs(number(text) - value) / unit < 10.0**-digits - 1e-9


def _table(
    key: str, source: str, title: str, data: str, columns: list[str], rows: list[list[str]], policy: str = ""
) -> Table:
    parsed = []
    for cells in rows:
        printed = dict(zip(columns, cells, strict=True))
        code = printed.pop("code")
        parsed.append(Row(printed.pop("name", code), code, printed.pop("policy", policy), printed))
    return Table(key, source, title, data, tuple(parsed))
