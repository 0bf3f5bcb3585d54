"""What a client can afford, and the paper's code names for it.

A budget says which part of a ranked list of items (weights, neurons, channels) a client keeps:
the first ``keep`` of it, or a pattern of equal bands of it, S1 the largest. A code such as
``1111223344`` has one digit for each client; a digit names a pattern of quarters.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from fedcover.errors import InputError


@dataclass(frozen=True)
class Budget:
    """The part of a ranked list that a client keeps.

    ``keep`` in (0, 1] keeps the first ceil(keep n) of n items. With ``bands``, the list is cut into
    len(bands) equal bands and those marked True are kept; ``keep`` is then their share.
    ``layers`` overrides this for single layers, by a budget or by a number of items.

    >>> Budget(0.75).held(torch.tensor([3, 0, 2, 1])).tolist()
    [False, True, True, True]
    """

    keep: float = 1.0
    bands: tuple[bool, ...] | None = None
    name: str = ""
    layers: tuple[tuple[str, "Budget | int"], ...] = ()

    def __post_init__(self) -> None:
        if self.bands is not None:
            if not any(self.bands):
                raise InputError(f"budget '{self.name}' keeps none of its {len(self.bands)} bands; keep at least one")
            object.__setattr__(self, "keep", sum(self.bands) / len(self.bands))
        elif isinstance(self.keep, bool) or not isinstance(self.keep, int | float) or not 0 < self.keep <= 1:
            raise InputError(f"keep must be in (0, 1]; got {self.keep}; it is the fraction KEPT, 0.75 prunes a quarter")

    @property
    def full(self) -> bool:
        """Whether this keeps everything in every layer."""
        return self.keep == 1 and not self.layers

    def __str__(self) -> str:
        return self.name or f"{self.keep:g}"

    @property
    def exact(self) -> str:
        """This budget in full, so that no two that differ read alike.

        >>> Budget(0.1 + 0.2).exact, pattern("1011", "2").exact
        ('0.30000000000000004', '2:1011')
        """
        bands = "" if self.bands is None else ":" + "".join("1" if band else "0" for band in self.bands)
        layers = "".join(f" {name}={b if isinstance(b, int) else b.exact}" for name, b in self.layers)
        return f"{self.name or repr(self.keep)}{bands}{layers}"

    def of_layer(self, layer: str) -> "Budget | int":
        """What this budget says of one layer."""
        return dict(self.layers).get(layer, self)

    def held(self, ranks: Tensor, layer: str = "") -> Tensor:
        """Which items of a ranked list are kept, given each item's rank (0 = first)."""
        size = ranks.numel()
        held = [
            ranks < end if start == 0 else ranks >= start if end == size else (ranks >= start) & (ranks < end)
            for start, end in self.spans(size, layer)
        ]
        return reduce(Tensor.logical_or, held) if held else torch.zeros_like(ranks, dtype=torch.bool)

    def spans(self, size: int, layer: str = "") -> list[tuple[int, int]]:
        """The ranks that are kept of a list of this size, as spans from the first to one before the last.

        >>> pattern("1011").spans(8), Budget(0.3).spans(10)
        ([(0, 2), (4, 8)], [(0, 3)])
        """
        rule = self.of_layer(layer)
        if isinstance(rule, int):
            if not 0 < rule <= size:
                raise InputError(f"budget '{self}' keeps {rule} items of '{layer}', which has {size}; use 1 to {size}")
            return [(0, rule)]
        if rule.bands is None:
            return [(0, max(1, share(rule.keep, size)))]
        ends = [share(b / len(rule.bands), size) for b in range(len(rule.bands) + 1)]
        found: list[tuple[int, int]] = []
        for kept, start, end in zip(rule.bands, ends, ends[1:], strict=False):
            if kept and end > start:
                if found and found[-1][1] == start:
                    start = found.pop()[0]
                found.append((start, end))
        if size and not found:
            where = f"'{layer}'" if layer else "a layer"
            raise InputError(f"budget '{self}' keeps none of the {size} items of {where}; use fewer bands")
        return found


def share(fraction: float, size: int) -> int:
    """ceil(fraction * size), safe against rounding of the product.

    >>> share(0.75, 6), share(0.1 + 0.2, 10)
    (5, 3)
    """
    return min(size, math.ceil(fraction * size - 1e-9))


def pattern(bits: str, name: str = "") -> Budget:
    """The budget for a pattern of bands, S1 first: ``pattern("1011")`` keeps S1, S3 and S4."""
    if len(bits) < 2 or set(bits) - {"0", "1"}:
        raise InputError(f"pattern '{bits}' must be two or more of 0 and 1, S1 first; such as 1011 for S1, S3, S4")
    return Budget(bands=tuple(bit == "1" for bit in bits), name=name or bits)


Codebook = Mapping[str, Budget]

MOST_CLIENTS = 1_000_000
"""The longest code that is read; a slip of the finger should not fill the memory."""

QUARTERS: Codebook = {
    digit: Budget(name=digit) if bits == "1111" else pattern(bits, digit)
    for digit, bits in zip("1234567", ("1111", "1011", "1101", "1110", "1001", "1010", "1100"), strict=True)
}
"""The paper's policies 1 to 7 as patterns of quarters; it never prints 5, 6 and 7."""


def parse_code(code: str, codebook: Codebook = QUARTERS) -> tuple[Budget, ...]:
    """The budgets that a code names, one for each client.

    ``1111223344`` is a digit each. With commas any item may be a digit, a pattern of bands
    (``11011000``) or a fraction with a point (``0.4``), and ``6x0.75`` repeats it.

    >>> [b.keep for b in parse_code("1247")], [str(b) for b in parse_code("2x1,0.4,110")]
    ([1.0, 0.75, 0.75, 0.5], ['1', '1', '0.4', '110'])
    """
    text = code.strip()
    if not text:
        raise InputError("the code is empty; give one digit for each client, such as 1111223344")
    if not set(text) & set(",.x "):
        return tuple(_item(digit, f"digit {i} of code '{code}'", codebook) for i, digit in enumerate(text, start=1))
    budgets: list[Budget] = []
    for item in text.replace(",", " ").split():
        times, _, what = item.rpartition("x")
        if times and not times.isdecimal():
            raise InputError(f"item '{item}' of code '{code}' must be ITEM or COUNTxITEM, such as 6x0.75")
        if int(times or 1) > MOST_CLIENTS:
            raise InputError(f"item '{item}' of code '{code}' repeats too often; use at most {MOST_CLIENTS}")
        if not int(times or 1):
            raise InputError(f"item '{item}' of code '{code}' is for no client; leave it out, or use 1x or more")
        budgets += [_item(what, f"item '{item}' of code '{code}'", codebook)] * int(times or 1)
    if not budgets:
        raise InputError(f"code '{code}' names no client; give one item for each, such as 4x1,6x0.75")
    return tuple(budgets)


def _item(text: str, where: str, codebook: Codebook) -> Budget:
    if text in codebook:
        return codebook[text]
    if len(text) > 1 and not set(text) - {"0", "1"}:
        return pattern(text)
    if "." in text:
        try:
            keep = float(text)
        except ValueError:
            raise InputError(f"{where} is '{text}', which is no number; use a fraction such as 0.75") from None
        return Budget(keep)
    valid = ", ".join(codebook)
    raise InputError(
        f"{where} is '{text}'; use one of {valid}, a pattern of bands such as 1011, or a keep such as 0.75"
    )


BudgetSpec = str | Sequence[Budget | float | str]


def budgets_of(spec: BudgetSpec, codebook: Codebook = QUARTERS) -> tuple[Budget, ...]:
    """Budgets from a code, or from a list of budgets, fractions and code items."""
    if isinstance(spec, str):
        return parse_code(spec, codebook)
    found: list[Budget] = []
    for item in spec:
        if isinstance(item, Budget):
            found.append(item)
        elif isinstance(item, str):
            found.append(_item(item, f"budget '{item}'", codebook))
        else:
            found.append(Budget(item))
    if not found:
        raise InputError("the list of budgets is empty; give one for each client, such as [1.0, 0.75, 0.5]")
    return tuple(found)


@dataclass(frozen=True)
class Budgets:
    """Budgets attached to the slots of a cohort or to the clients themselves; see ``by_slot``, ``by_client``."""

    spec: BudgetSpec
    by: str

    def resolve(self, codebook: Codebook) -> tuple[Budget, ...]:
        """The budgets, with digits read in this codebook."""
        return budgets_of(self.spec, codebook)


def by_slot(spec: BudgetSpec) -> Budgets:
    """Budgets of the places in a round's cohort, as in the paper: whoever is drawn into slot 3 gets item 3.

    >>> by_slot("1111223344").by
    'slot'
    """
    return Budgets(spec, "slot")


def by_client(spec: BudgetSpec) -> Budgets:
    """Budgets of the clients themselves, as in a real fleet: client i gets item i modulo the length."""
    return Budgets(spec, "client")
