"""What a recipe adds to the gradients of plain SGD: weight decay, FedProx's proximal term, and SCAFFOLD's shifts."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedcover.params import Params
from fedcover.training.recipes import LocalSGD


@dataclass(frozen=True)
class LinearTerm:
    """A term that is added to gradients: strength (theta - anchor) + shift.

    Args:
        strength: The sum of weight decay and of the proximal term's mu.
        anchors: The anchor of each tensor; 0 for one that is left out.
        shifts: The shift of each tensor; 0 for one that is left out.
    """

    strength: float
    anchors: Params
    shifts: Params


def linear_term_of(recipe: LocalSGD, start: Params, shifts: Mapping[str, Tensor]) -> LinearTerm | None:
    """Return the linear term that a recipe adds to gradients; None if it adds none.

    Args:
        recipe: The recipe.
        start: The parameters at the start of the round, inside the mask.
        shifts: The shifts, by name.

    >>> import torch
    >>> term = linear_term_of(LocalSGD(weight_decay=0.01, proximal=0.03), {"w": torch.ones(2)}, {})
    >>> term.strength, term.anchors["w"].tolist()
    (0.04, [0.75, 0.75])
    """
    strength = recipe.weight_decay + recipe.proximal
    if not strength and not shifts:
        return None
    share = recipe.proximal / strength if strength else 0.0
    return LinearTerm(strength, {name: share * tensor for name, tensor in start.items()} if share else {}, dict(shifts))


def is_plain_but_for_linear_term(recipe: LocalSGD) -> bool:
    """Return whether a recipe is SGD with momentum, and at most a linear term in addition."""
    return replace(recipe, weight_decay=0.0, proximal=0.0, control_variates=False).is_plain
