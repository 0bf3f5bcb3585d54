"""Budgets of clients, and the paper's codes for them.

A budget selects the part of a ranked list of items (weights, neurons, channels) that a client keeps:
the first ``keep`` of it, or a pattern of equal bands of it, where S1 holds the items of the highest
rank. A code such as ``1111223344`` has one digit for each client; a digit names a pattern of quarters.
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
    """The part of a ranked list of items that a client keeps.

    Args:
        keep: Fraction of the items that is kept, in (0, 1]: the first ceil(keep * n) of n items, at least one.
        bands: Equal bands of the list, highest ranks first; those marked True are kept, and ``keep`` is set to
            their share. None keeps the first ``keep``.
        name: Name for display, such as the digit of a code; by default the fraction.
        layers: Exceptions for single layers, as pairs of a layer's name and a budget or a number of items.

    Raises:
        InputError: If ``keep`` is not in (0, 1], or if no band is kept.

    >>> Budget(0.75).kept(torch.tensor([3, 0, 2, 1])).tolist()
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
        """True if every item of every layer is kept."""
        return self.keep == 1 and not self.layers

    def __str__(self) -> str:
        return self.name or f"{self.keep:g}"

    @property
    def exact(self) -> str:
        """An exact description, different for any two budgets that differ.

        >>> Budget(0.1 + 0.2).exact, pattern("1011", "2").exact
        ('0.30000000000000004', '2:1011')
        """
        bands = "" if self.bands is None else ":" + "".join("1" if band else "0" for band in self.bands)
        layers = "".join(f" {name}={b if isinstance(b, int) else b.exact}" for name, b in self.layers)
        return f"{self.name or repr(self.keep)}{bands}{layers}"

    def scaled(self, share: float) -> "Budget":
        """Return a share of this budget, which must be a fraction without exceptions.

        >>> Budget(0.5).scaled(0.5), Budget(0.5).scaled(1.0)
        (Budget(keep=0.25, bands=None, name='', layers=()), Budget(keep=0.5, bands=None, name='', layers=()))
        """
        if share == 1:
            return self
        if self.bands is not None or self.layers:
            raise InputError(f"budget '{self}' is a pattern, of which there is no share; give a fraction such as 0.5")
        return Budget(self.keep * share)

    def of_layer(self, layer: str) -> "Budget | int":
        """Return the budget of one layer, or the number of items that it keeps."""
        return dict(self.layers).get(layer, self)

    def kept(self, ranks: Tensor, layer: str = "") -> Tensor:
        """Return a bool tensor that marks the items that are kept.

        Args:
            ranks: Rank of each item; 0 is the first.
            layer: Name of the layer that the items belong to, for budgets with ``layers``.
        """
        size = ranks.numel()
        inside = [
            ranks < end if start == 0 else ranks >= start if end == size else (ranks >= start) & (ranks < end)
            for start, end in self.spans(size, layer)
        ]
        return reduce(Tensor.logical_or, inside) if inside else torch.zeros_like(ranks, dtype=torch.bool)

    def spans(self, size: int, layer: str = "") -> list[tuple[int, int]]:
        """Return the ranks that are kept of a list of this size, as half-open intervals (start, end).

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
        spans: list[tuple[int, int]] = []
        for kept, start, end in zip(rule.bands, ends, ends[1:], strict=False):
            if kept and end > start:
                if spans and spans[-1][1] == start:
                    start = spans.pop()[0]
                spans.append((start, end))
        if size and not spans:
            where = f"'{layer}'" if layer else "a layer"
            raise InputError(f"budget '{self}' keeps none of the {size} items of {where}; use fewer bands")
        return spans


def share(fraction: float, size: int) -> int:
    """Return ceil(fraction * size), robust against rounding of the product.

    >>> share(0.75, 6), share(0.1 + 0.2, 10)
    (5, 3)
    """
    return min(size, math.ceil(fraction * size - 1e-9))


def pattern(bits: str, name: str = "") -> Budget:
    """Return the budget for a pattern of bands, S1 first: ``pattern("1011")`` keeps S1, S3 and S4."""
    if len(bits) < 2 or set(bits) - {"0", "1"}:
        raise InputError(f"pattern '{bits}' must be two or more of 0 and 1, S1 first, such as 1011 for S1, S3 and S4")
    return Budget(bands=tuple(bit == "1" for bit in bits), name=name or bits)


Codebook = Mapping[str, Budget]

MOST_CLIENTS = 1_000_000
"""Most repetitions of one item of a code, so that a typing error does not fill the memory."""

QUARTERS: Codebook = {
    digit: Budget(name=digit) if bits == "1111" else pattern(bits, digit)
    for digit, bits in zip("1234567", ("1111", "1011", "1101", "1110", "1001", "1010", "1100"), strict=True)
}
"""The paper's digits 1 to 7 as patterns of quarters; the paper does not print 5, 6 and 7."""


def parse_code(code: str, codebook: Codebook = QUARTERS) -> tuple[Budget, ...]:
    """Return the budgets that a code names, one for each client.

    Args:
        code: Either digits only, one for each client (``1111223344``), or items separated by commas or spaces. An
            item is a digit, a pattern of bands (``11011000``) or a fraction with a point (``0.4``), and may be
            repeated: ``6x0.75``.
        codebook: Budget of each digit; by default the paper's patterns of quarters.

    Raises:
        InputError: If the code is empty or an item cannot be read; the message names the item.

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
        times, _, single = item.rpartition("x")
        if times and not times.isdecimal():
            raise InputError(f"item '{item}' of code '{code}' must be ITEM or COUNTxITEM, such as 6x0.75")
        if int(times or 1) > MOST_CLIENTS:
            raise InputError(f"item '{item}' of code '{code}' repeats too often; use at most {MOST_CLIENTS}")
        if not int(times or 1):
            raise InputError(f"item '{item}' of code '{code}' is for 0 clients; leave it out, or use 1x or more")
        budgets += [_item(single, f"item '{item}' of code '{code}'", codebook)] * int(times or 1)
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
            raise InputError(f"{where} is '{text}', which is not a number; use a fraction such as 0.75") from None
        return Budget(keep)
    valid = ", ".join(codebook)
    raise InputError(
        f"{where} is '{text}'; use one of {valid}, a pattern of bands such as 1011, or a keep such as 0.75"
    )


BudgetSpec = str | Sequence[Budget | float | str]


def budgets_of(spec: BudgetSpec, codebook: Codebook = QUARTERS) -> tuple[Budget, ...]:
    """Return the budgets of a code, or of a list of budgets, fractions and code items."""
    if isinstance(spec, str):
        return parse_code(spec, codebook)
    budgets: list[Budget] = []
    for item in spec:
        if isinstance(item, Budget):
            budgets.append(item)
        elif isinstance(item, str):
            budgets.append(_item(item, f"budget '{item}'", codebook))
        else:
            budgets.append(Budget(item))
    if not budgets:
        raise InputError("the list of budgets is empty; give one for each client, such as [1.0, 0.75, 0.5]")
    return tuple(budgets)


@dataclass(frozen=True)
class Budgets:
    """Budgets of the slots of a cohort or of the clients themselves; made by ``by_slot`` and ``by_client``."""

    spec: BudgetSpec
    """A code, or a list of budgets, fractions and code items."""
    by: str
    """``slot`` or ``client``."""

    def resolve(self, codebook: Codebook) -> tuple[Budget, ...]:
        """Return the budgets; digits are looked up in this codebook."""
        return budgets_of(self.spec, codebook)


def by_slot(spec: BudgetSpec) -> Budgets:
    """Attach budgets to the slots of a round's cohort, as in the paper: the client drawn into slot i gets item i.

    Args:
        spec: A code such as ``1111223344`` (see ``parse_code``), or a list of budgets, fractions and code items.
            A cohort of more slots starts again at the first item.

    Returns:
        Budgets to pass to ``Federation``.

    >>> by_slot("1111223344").by
    'slot'
    """
    return Budgets(spec, "slot")


def by_client(spec: BudgetSpec) -> Budgets:
    """Attach budgets to the clients themselves, as in a fleet of devices: client i gets item i modulo the length.

    Args:
        spec: A code such as ``1111223344`` (see ``parse_code``), or a list of budgets, fractions and code items.

    Returns:
        Budgets to pass to ``Federation``.

    >>> [budget.keep for budget in by_client([1.0, 0.5]).resolve(QUARTERS)]
    [1.0, 0.5]
    """
    return Budgets(spec, "client")
