"""The rule of fast steps: what recipes of SGD have in common, as numbers and tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedcover.params import Params
from fedcover.training.recipes import LocalSGD


@dataclass(frozen=True)
class Rule:
    """How a step follows from a gradient g.

    With g clipped at a norm, v <- momentum v + g + strength (theta - anchor) + shift, and theta <- theta - lr v; with
    Nesterov momentum as torch's SGD.

    Args:
        lr: The step size.
        momentum: The factor by which momentum decays at each step.
        clip: The largest norm of g inside the mask; 0 for none.
        nesterov: Whether momentum is Nesterov's.
        strength: The sum of weight decay and of the proximal term's mu.
        anchors: The anchor of each tensor; 0 for one that is left out.
        shifts: The shift of each tensor; 0 for one that is left out.
    """

    lr: float
    momentum: float
    clip: float = 0.0
    nesterov: bool = False
    strength: float = 0.0
    anchors: Params = field(default_factory=dict)
    shifts: Params = field(default_factory=dict)

    @property
    def is_corrected(self) -> bool:
        """Whether something is added to gradients."""
        return bool(self.strength or self.shifts)

    @property
    def is_apart(self) -> bool:
        """Whether gradients are computed apart from momenta: to clip them, all of them; for Nesterov, each."""
        return bool(self.clip or self.nesterov)


def rule_of(recipe: LocalSGD, start: Params, shifts: Mapping[str, Tensor]) -> Rule | None:
    """Return the rule of a recipe; None if a rule cannot express it.

    Args:
        recipe: The recipe.
        start: The parameters at the start of the round, inside the mask; read only by recipes with a proximal term.
        shifts: The shifts, by name.

    >>> import torch
    >>> rule = rule_of(LocalSGD(weight_decay=0.01, proximal=0.03), {"w": torch.ones(2)}, {})
    >>> rule.strength, rule.anchors["w"].tolist()
    (0.04, [0.75, 0.75])
    >>> rule_of(LocalSGD(keep_moments=True), {}, {}) is None
    True
    """
    other = replace(recipe, weight_decay=0.0, proximal=0.0, nesterov=False, clip=None, control_variates=False)
    # The definition clips proximal terms and shifts too, but not weight decay.
    if not other.is_plain or (recipe.clip and (recipe.proximal or shifts)):
        return None
    strength = recipe.weight_decay + recipe.proximal
    # With the start as anchor, and not as a shift, the term is exactly 0 at the first step.
    anchors = {n: t * (recipe.proximal / strength) for n, t in start.items()} if recipe.proximal else {}
    nesterov = recipe.nesterov and recipe.momentum > 0
    return Rule(recipe.lr, recipe.momentum, recipe.clip or 0.0, nesterov, strength, anchors, dict(shifts))
