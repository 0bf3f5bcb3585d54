"""Training options: what a client does beyond plain masked SGD, and what it returns beyond its trained values.

Most policies need none of this. Those that do return one ``TrainingOptions`` per client.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from fedcover.errors import InputError, check_number, check_whole
from fedcover.params import Mask, Params, check_mask, on_device
from fedcover.training.exits import Exits

MOST_WIDTHS = 255
"""The largest number of widths: for each entry, the number of widths that contain it must fit into one byte."""

PRUNED_ONLY = ("gains", "widths", "regrow")
"""The options that have no meaning if a client sees the entries outside its mask: a gain makes up for missing units,
widths set entries to 0, and regrown entries start at 0."""


@dataclass(frozen=True)
class Regrow:
    """A readjustment of the mask during training.

    In each pruned tensor the active weights with the smallest magnitudes are dropped, and as many inactive ones with
    the largest gradients are grown, starting at 0. The update then has the new mask.

    Args:
        share: The share of the active weights that is replaced, from 0 to 1.
        after: The number of local epochs before the readjustment.

    Raises:
        InputError: If a value is out of range.

    >>> Regrow(0.3)
    Regrow(share=0.3, after=1)
    """

    share: float
    after: int = 1

    def __post_init__(self) -> None:
        check_number("share", self.share, -1e-300, 1 + 1e-9, "a number from 0 to 1")
        check_whole("after", self.after, 1)


@dataclass(frozen=True, eq=False)
class TrainingOptions:
    """What one client does in one round beyond plain masked SGD.

    Args:
        gains: For tensors by name, the factor by which the tensor is multiplied in the forward passes of training
            only. HeteroFL's Scaler is a gain of 1 / r for the weights and biases of hidden layers.
        thresholds: For tensors by name, tau: gradients are multiplied by 1 + 2 tau |theta| / (|theta| + tau)^2,
            before momentum (FIARSE).
        widths: Masks, each inside the next and all inside the client's mask. Each step draws one of them: entries
            outside it are 0 in that step, and their values and momenta do not change (FjORD).
        distil: With widths, the weight a in the loss (1 - a) loss + a KL(scores of the widest || scores of the
            drawn width).
        shifts: For tensors by name, a tensor that is added to its gradient in every step (SCAFFOLD).
        moments: By the name of a moment, the tensors with which it starts, 0 outside the mask. Only a federation
            sets them, if the recipe keeps moments; policies leave them empty.
        regrow: A readjustment of the mask during training (FedDST). It cannot be combined with widths.
        report: Whether the client reports the sum over its steps of the squared gradients of all entries, pruned
            ones included (PruneFL).
        exits: Of a model with exits, those that the client trains, and how its loss combines them (DepthFL). By default
            all that its mask leaves, with the sum of their losses.
        complement: Whether the client sees the entries outside its mask at their values in theta, where they stand
            still, instead of 0. Only a federation sets it, from its ``complement``.

    Raises:
        InputError: If a value is out of range, or options contradict each other.

    >>> TrainingOptions(thresholds={"fc1.weight": 0.01}).whole, TrainingOptions(report=True).whole
    (False, True)
    """

    gains: Mapping[str, float] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    widths: tuple[Mask, ...] = ()
    distil: float = 0.0
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    moments: Mapping[str, Params] = field(default_factory=dict)
    regrow: Regrow | None = None
    report: bool = False
    exits: Exits | None = None
    complement: bool = False

    def __post_init__(self) -> None:
        for name, gain in self.gains.items():
            check_number(f"the gain of '{name}'", gain, 0, math.inf, "a positive number")
        for name, tau in self.thresholds.items():
            check_number(f"the threshold of '{name}'", tau, -1e-300, math.inf, "0 or more, and finite")
        check_number("distil", self.distil, -1e-300, 1, "a number in [0, 1)")
        if len(self.widths) > MOST_WIDTHS:
            raise InputError(f"widths must be at most {MOST_WIDTHS} masks; got {len(self.widths)}")
        if self.distil and not self.widths:
            raise InputError("distil needs widths, the widest of which is the teacher; give widths, or leave it at 0")
        if self.widths and self.regrow:
            raise InputError("widths and regrow cannot be combined; give only one of them")
        if self.complement and (clash := next((name for name in PRUNED_ONLY if getattr(self, name)), None)):
            raise InputError(
                f"{clash} are for clients that see zeros outside their masks, and these see values; use complement"
                f" 'zero', or a policy without {clash}"
            )

    @property
    def gain(self) -> float:
        """The largest gain; 1 if there is none."""
        return max(self.gains.values(), default=1.0)

    @property
    def whole(self) -> bool:
        """Whether training needs entries outside the mask or changes it, so that the model cannot be shrunk."""
        return bool(self.widths or self.regrow or self.report or self.complement)

    def has_beyond(self, *names: str) -> bool:
        """Return whether any option other than those named is set."""
        return any(bool(getattr(self, option.name)) for option in fields(self) if option.name not in names)

    def on_device(self, device: torch.device) -> "TrainingOptions":
        """Return these options with their tensors on a device."""
        widths = tuple(on_device(mask, device) for mask in self.widths)
        moments = {moment: on_device(tensors, device) for moment, tensors in self.moments.items()}
        return replace(self, widths=widths, shifts=on_device(self.shifts, device), moments=moments)


PLAIN = TrainingOptions()
"""No options."""


def regrown(theta: Tensor, kept: Tensor, grad: Tensor, share: float) -> Tensor:
    """Return a tensor's mask after readjustment, with as many active entries as before.

    The active entries with the smallest |theta| are dropped, and as many of the entries that were inactive are grown,
    those with the largest |grad|. Ties are broken by index.

    Args:
        theta: The tensor.
        kept: Its mask.
        grad: Its gradient, at inactive entries too.
        share: The share of the active entries that is replaced.

    >>> kept = torch.tensor([True, True, False, False])
    >>> regrown(torch.tensor([0.5, 0.1, 0.0, 0.0]), kept, torch.tensor([9.0, 9.0, 1.0, 2.0]), 0.5).tolist()
    [True, False, False, True]
    """
    shares = torch.tensor([share], dtype=torch.float64, device=kept.device)
    return regrown_each(theta.unsqueeze(0), kept.unsqueeze(0), grad.unsqueeze(0), shares)[0]


def regrown_each(theta: Tensor, kept: Tensor, grad: Tensor, shares: Tensor) -> Tensor:
    """Return ``regrown`` for each tensor of a stack, each with its own share; on a GPU without synchronisation."""
    flat = kept.reshape(len(kept), -1)
    active = flat.sum(1)
    counts = torch.minimum((shares * active + 1e-9).long(), flat.shape[1] - active)
    chosen = torch.arange(flat.shape[1], device=kept.device) < counts.unsqueeze(1)
    size, slope = theta.reshape(flat.shape).abs(), grad.reshape(flat.shape).abs().nan_to_num(0.0)
    smallest = size.masked_fill(~flat, math.inf).argsort(dim=1, stable=True)
    steepest = slope.masked_fill(flat, -1.0).argsort(dim=1, descending=True, stable=True)
    new = flat.scatter(1, smallest, flat.gather(1, smallest) & ~chosen)
    return new.scatter(1, steepest, new.gather(1, steepest) | chosen).view(kept.shape)


def levels_of(widths: Sequence[Mask]) -> Params:
    """Return for each entry the number of widths that contain it; tensors that no width names are left out."""
    names = list(dict.fromkeys(name for mask in widths for name in mask))
    levels: Params = {}
    for name in names:
        like = next(mask[name] for mask in widths if name in mask)
        levels[name] = torch.full_like(like, sum(name not in mask for mask in widths), dtype=torch.uint8)
        for mask in widths:
            if name in mask:
                levels[name] += mask[name]
    return levels


def widths_of(levels: Mapping[str, Tensor], num_widths: int) -> tuple[Mask, ...]:
    """Return the nested masks, narrowest first, from which ``levels_of`` computed the levels.

    >>> narrow, wide = torch.tensor([True, False, False]), torch.tensor([True, True, False])
    >>> [mask["w"].tolist() for mask in widths_of(levels_of([{"w": narrow}, {"w": wide}]), 2)]
    [[True, False, False], [True, True, False]]
    """
    return tuple({name: level >= num_widths - i for name, level in levels.items()} for i in range(num_widths))


def check_options(options: object, theta: Params, mask: Mask, whose: str) -> None:
    """Raise InputError unless training options fit theta and their client's mask.

    Args:
        options: What a policy returned for a client: ``TrainingOptions`` or None.
        theta: The parameters of the model.
        mask: The client's mask.
        whose: How messages refer to the options.
    """
    if options is None:
        return
    if not isinstance(options, TrainingOptions):
        raise InputError(
            f"{whose} must be a fedcover.TrainingOptions, or None for plain training; got a {type(options).__name__}"
        )
    tensors = {"shift": options.shifts, **options.moments}
    for name in (*options.gains, *options.thresholds, *(name for named in tensors.values() for name in named)):
        if name not in theta:
            raise InputError(
                f"{whose} names '{name}', which is not a parameter of the model; it has {', '.join(theta)}"
            )
    for kind, name, tensor in ((kind, name, t) for kind, named in tensors.items() for name, t in named.items()):
        if tensor.shape != theta[name].shape:
            raise InputError(
                f"{whose} have a {kind} of shape {tuple(tensor.shape)} for '{name}', whose shape is"
                f" {tuple(theta[name].shape)}; give one number for each entry"
            )
    wider = [*options.widths[1:], mask]
    for number, (narrow, wide) in enumerate(zip(options.widths, wider, strict=False)):
        check_mask(narrow, theta, f"width {number} of {whose}")
        for name, kept in wide.items():
            if name not in narrow or bool((narrow[name] & ~kept).any()):
                outer = "the client's mask" if wide is mask else f"width {number + 1}"
                raise InputError(f"width {number} of {whose} is not inside {outer} at '{name}'; give nested masks")
