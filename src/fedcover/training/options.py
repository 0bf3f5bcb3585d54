"""How a client trains beyond plain masked SGD, and what it sends back beyond its trained values.

Most policies need none of this. Those that do hand out one ``TrainingOptions`` for each client.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedcover.errors import InputError, check_number, check_whole
from fedcover.params import Mask, Params, check_mask, on_device

MOST_WIDTHS = 255
"""So many nested masks fit into one byte for each entry."""


@dataclass(frozen=True)
class Regrow:
    """A mask readjusted in mid-training: of each pruned tensor the smallest active weights go, as many others come.

    ``share`` is the part of the active weights that goes, ``after`` the number of local epochs before it does.
    """

    share: float
    after: int = 1

    def __post_init__(self) -> None:
        check_number("share", self.share, -1e-300, 1 + 1e-9, "a number from 0 to 1")
        check_whole("after", self.after, 1)


@dataclass(frozen=True, eq=False)
class TrainingOptions:
    """One client's training in one round, where it is more than plain masked SGD.

    >>> TrainingOptions(thresholds={"fc1.weight": 0.01}).whole, TrainingOptions(report=True).whole
    (False, True)
    """

    gains: Mapping[str, float] = field(default_factory=dict)
    """What tensors are multiplied by in the forward passes of training alone: HeteroFL's Scaler has 1 / r for the
    weights and biases of hidden layers."""
    thresholds: Mapping[str, float] = field(default_factory=dict)
    """tau by tensor: its gradients are multiplied by 1 + 2 tau |theta| / (|theta| + tau)^2, before momentum."""
    widths: tuple[Mask, ...] = ()
    """Masks, each inside the next and all inside the client's own. Each batch draws one of them; what is outside it
    is not there in that step, and stands still, its momentum too."""
    distil: float = 0.0
    """With widths: the share of the loss that is KL(scores of the widest || scores of the drawn one)."""
    regrow: Regrow | None = None
    """The update then carries the new mask."""
    report: bool = False
    """Whether the client sends the sum over its steps of the squared gradients of all entries, pruned ones too."""
    rest: bool = False
    """Whether the client sits this round out."""

    def __post_init__(self) -> None:
        for name, gain in self.gains.items():
            check_number(f"the gain of '{name}'", gain, 0, math.inf, "a positive number")
        for name, tau in self.thresholds.items():
            check_number(f"the threshold of '{name}'", tau, -1e-300, math.inf, "0 or more, and finite")
        check_number("distil", self.distil, -1e-300, 1, "a number in [0, 1)")
        if len(self.widths) > MOST_WIDTHS:
            raise InputError(f"a drill has {len(self.widths)} widths; give at most {MOST_WIDTHS}")
        if self.distil and not self.widths:
            raise InputError("distil is from the widest of several widths to the drawn one; give widths, or leave it 0")
        if self.widths and self.regrow:
            raise InputError("a drill cannot both draw widths and regrow its mask; give one of them")

    @property
    def whole(self) -> bool:
        """Whether it needs entries that the mask prunes, so that the client trains the model whole."""
        return bool(self.widths or self.regrow or self.report)

    @property
    def plain(self) -> bool:
        """Whether training is still plain masked SGD, and at most a report is asked for."""
        return not (self.gains or self.thresholds or self.widths or self.regrow)

    def on_device(self, device: torch.device) -> "TrainingOptions":
        """This drill with its masks on a device."""
        return replace(self, widths=tuple(on_device(mask, device) for mask in self.widths)) if self.widths else self


def boost(theta: Tensor, tau: Tensor | float) -> Tensor:
    """1 + 2 tau |theta| / (|theta| + tau)^2, entry by entry; 1 where tau is 0.

    >>> boost(torch.tensor([0.0, 1.0, 3.0]), 1.0).tolist()
    [1.0, 1.5, 1.375]
    """
    size = theta.abs()
    below = (size + tau).square_().clamp_min_(torch.finfo(theta.dtype).tiny)
    return size.mul_(2 * tau).div_(below).add_(1)


def regrown(theta: Tensor, kept: Tensor, grad: Tensor, share: float) -> Tensor:
    """A tensor's mask after readjustment: as many entries as before, grown only where it was inactive.

    The smallest active |theta| go; of those that were inactive the largest |grad| come. Ties by index.

    >>> kept = torch.tensor([True, True, False, False])
    >>> regrown(torch.tensor([0.5, 0.1, 0.0, 0.0]), kept, torch.tensor([9.0, 9.0, 1.0, 2.0]), 0.5).tolist()
    [True, False, False, True]
    """
    shares = torch.tensor([share], dtype=torch.float64, device=kept.device)
    return regrown_each(theta.unsqueeze(0), kept.unsqueeze(0), grad.unsqueeze(0), shares)[0]


def regrown_each(theta: Tensor, kept: Tensor, grad: Tensor, shares: Tensor) -> Tensor:
    """``regrown`` of each of a stack of tensors by a share of its own; on a GPU nobody waits for it."""
    flat = kept.reshape(len(kept), -1)
    active = flat.sum(1)
    many = torch.minimum((shares * active + 1e-9).long(), flat.shape[1] - active)
    chosen = torch.arange(flat.shape[1], device=kept.device) < many.unsqueeze(1)
    size, slope = theta.reshape(flat.shape).abs(), grad.reshape(flat.shape).abs().nan_to_num(0.0)
    going = size.masked_fill(~flat, math.inf).argsort(dim=1, stable=True)
    coming = slope.masked_fill(flat, -1.0).argsort(dim=1, descending=True, stable=True)
    new = flat.scatter(1, going, flat.gather(1, going) & ~chosen)
    return new.scatter(1, coming, new.gather(1, coming) | chosen).view(kept.shape)


def levels_of(widths: Sequence[Mask]) -> Params:
    """For each entry the number of widths that hold it; what no width mentions is left out."""
    names = list(dict.fromkeys(name for mask in widths for name in mask))
    found: Params = {}
    for name in names:
        like = next(mask[name] for mask in widths if name in mask)
        found[name] = torch.full_like(like, sum(name not in mask for mask in widths), dtype=torch.uint8)
        for mask in widths:
            if name in mask:
                found[name] += mask[name]
    return found


def widths_of(levels: Mapping[str, Tensor], many: int) -> tuple[Mask, ...]:
    """The nested masks, narrowest first, that ``levels_of`` counted.

    >>> narrow, wide = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    >>> [mask["w"].tolist() for mask in widths_of(levels_of([{"w": narrow}, {"w": wide}]), 2)]
    [[True, False, False], [True, True, False]]
    """
    return tuple({name: level >= many - i for name, level in levels.items()} for i in range(many))


def check_options(options: object, theta: Params, mask: Mask, whose: str) -> None:
    """Nothing, or an error that says how a drill does not fit theta and its client's mask."""
    if options is None:
        return
    if not isinstance(options, TrainingOptions):
        raise InputError(f"{whose} is a {type(options).__name__}; return a fedcover Drill, or None for plain training")
    for name in (*options.gains, *options.thresholds):
        if name not in theta:
            raise InputError(f"{whose} names '{name}', which the model has not; it has {', '.join(theta)}")
    wider = [*options.widths[1:], mask]
    for number, (narrow, wide) in enumerate(zip(options.widths, wider, strict=False)):
        check_mask(narrow, theta, f"width {number} of {whose}")
        for name, kept in wide.items():
            if name not in narrow or bool((narrow[name] & ~kept).any()):
                what = "the client's mask" if wide is mask else f"width {number + 1}"
                raise InputError(f"width {number} of {whose} is not inside {what} at '{name}'; give nested masks")
