"""Screening: compare what each client sends with the rest of its cohort before anything is averaged.

The size of a client's change in a layer is its root mean square over the entries that the client holds, so that clients
with small sub-models are comparable with those that hold everything:

    r_{n,l} = sqrt( sum_{i in l} m_{n,i} (theta_{n,i} - theta_i)^2 / sum_{i in l} m_{n,i} ) / g_n,

where g_n is the factor by which the server asked the client to scale its values in training (HeteroFL's Scaler), or 1.

The bound of a layer is a multiple of the median of r_{n,l} over the clients that hold it, times 1 + 4 / sqrt(entries),
since the changes of small layers, such as a bias of two entries, scatter more. A layer with fewer than three holders,
or whose median is 0, has no median to trust: the median over clients of their largest r_{n,l} takes its place.
With fewer than three clients nothing is bounded. Every round is compared with itself only, so the first round is
screened like any other.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import torch

from fedcover.aggregation.base import ClientUpdate
from fedcover.errors import InputError, check_number
from fedcover.params import Params, numbers

LEAST = 3
"""The number of clients needed for a median that one liar does not decide."""
SCATTER = 4.0
"""How much more the changes of a layer scatter if it has few entries: 1 + SCATTER / sqrt(entries)."""
ACTIONS = ("clip", "reject")

ChangeSizes = Mapping[str, float]
"""The size of one client's change in each layer of which it holds an entry."""


@dataclass(frozen=True)
class Screening:
    """Limits on a client's influence, as multiples of the median of its cohort.

    Args:
        change: The largest change of a layer; infinity for no limit.
        action: What happens to a client beyond it: ``clip`` scales the change of each such layer down to the limit,
            ``reject`` leaves the client out of the round.
        examples: The largest number of examples with which a client counts where aggregation weights clients by them;
            infinity for no limit.

    Raises:
        InputError: If a value is out of range.

    >>> sizes = {client: {"w": size} for client, size in enumerate((1.0, 3.0, 2.0))}
    >>> Screening(change=2.0).bounds(sizes, {"w": torch.zeros(10_000)})
    {'w': 4.16}
    """

    change: float = 3.0
    action: Literal["clip", "reject"] = "clip"
    examples: float = 2.0

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise InputError(f"action must be one of {', '.join(ACTIONS)}; got {self.action!r}")
        for name, value in (("change", self.change), ("examples", self.examples)):
            if value != math.inf:
                must = "a multiple of the cohort's median of 1 or more, or infinity for no limit"
                check_number(name, value, math.nextafter(1, 0), math.inf, must)

    def bounds(self, sizes: Mapping[int, ChangeSizes], theta: Params) -> dict[str, float]:
        """Return the largest change of each layer, from the sizes of the cohort's changes; empty if there is no bound.

        Args:
            sizes: For each client what ``change_sizes`` returns.
            theta: The global model, of which only the numbers of entries are read.
        """
        if len(sizes) < LEAST or self.change == math.inf:
            return {}
        largest = median(max(size.values(), default=0.0) for size in sizes.values())
        bounds = {}
        for layer in dict.fromkeys(name for size in sizes.values() for name in size):
            holders = [size[layer] for size in sizes.values() if layer in size]
            usual = (median(holders) if len(holders) >= LEAST else 0.0) or largest
            if usual:  # a multiple of 0 would stop a cohort in which most clients do not move
                bounds[layer] = self.change * usual * (1 + SCATTER / math.sqrt(theta[layer].numel()))
        return bounds


def change_sizes(update: ClientUpdate, theta: Params, gain: float = 1.0) -> dict[str, float]:
    """Return the root mean square of a client's change over the entries that it holds, for each layer.

    Args:
        update: The client's update; values outside its mask do not count.
        theta: The global model before the round.
        gain: The factor by which the client was asked to scale its values.

    >>> update = ClientUpdate(0, {"w": torch.tensor([4.0, 7.0])}, {"w": torch.tensor([True, False])})
    >>> change_sizes(update, {"w": torch.tensor([1.0, 0.0])})
    {'w': 3.0}
    """
    scalars = []
    for name, old in theta.items():
        square = (update.theta[name].to(old.device, torch.float64) - old.double()).square()
        kept = update.mask.get(name)
        if kept is None:
            scalars += [square.sum(), square.new_tensor(square.numel())]
        else:
            kept = kept.to(old.device)
            scalars += [torch.where(kept, square, 0.0).sum(), kept.sum(dtype=torch.float64)]
    values = numbers(scalars)
    pairs = zip(theta, values[::2], values[1::2], strict=True)
    return {name: math.sqrt(total / count) / gain for name, total, count in pairs if count}


def excess(size: ChangeSizes, bounds: Mapping[str, float]) -> tuple[str, float] | None:
    """Return the layer that exceeds its bound by the largest factor, and that factor; None if none does.

    >>> excess({"v": 1.0, "w": 6.0}, {"v": 2.0, "w": 4.0})
    ('w', 1.5)
    """
    over = {name: size[name] / bound for name, bound in bounds.items() if name in size and size[name] > bound}
    worst = max(over, key=lambda name: over[name], default=None)
    return None if worst is None else (worst, over[worst])


def clipped(update: ClientUpdate, theta: Params, size: ChangeSizes, bounds: Mapping[str, float]) -> ClientUpdate:
    """Return an update in which the change of each layer beyond its bound is scaled down to it.

    >>> update = ClientUpdate(0, {"w": torch.tensor([7.0, 1.0])}, {})
    >>> clipped(update, {"w": torch.tensor([1.0, 1.0])}, {"w": 6.0}, {"w": 3.0}).theta["w"].tolist()
    [4.0, 1.0]
    """
    scaled = {}
    for name, bound in bounds.items():
        if size.get(name, 0.0) > bound:
            old, new = theta[name], update.theta[name]
            change = (new.to(old.device, torch.float64) - old.double()) * (bound / size[name])
            scaled[name] = (old.double() + change).to(new.dtype)
    return replace(update, theta={**update.theta, **scaled}) if scaled else update
