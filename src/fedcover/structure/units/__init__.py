"""Units: the entries that one neuron, channel or attention head owns, which are kept or removed together.

They are found by labels that a forward pass carries from operation to operation: flatten, pooling, normalisation,
residual additions, ``torch.cat`` and attention, so no layer name is special. Every group of units is verified before it
is used: a smaller copy of the model must give the outputs of the masked model. Layers whose units cannot be followed or
cut stay whole, with the reason in ``left_whole``.
"""

from fedcover.structure.units.group import Member, UnitGroup, layer_of
from fedcover.structure.units.masks import masks_of_axes, narrow, unit_axes
from fedcover.structure.units.slicing import Cuts, cut, cuts_of, cuts_of_units, shape_after, smaller_copy
from fedcover.structure.units.structure import UnitStructure, find_groups, groups_for, unit_structure

__all__ = [
    "Cuts",
    "Member",
    "UnitGroup",
    "UnitStructure",
    "cut",
    "cuts_of",
    "cuts_of_units",
    "find_groups",
    "groups_for",
    "layer_of",
    "masks_of_axes",
    "narrow",
    "shape_after",
    "smaller_copy",
    "unit_axes",
    "unit_structure",
]
