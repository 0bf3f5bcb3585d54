"""Units: the entries that one neuron, channel or attention head owns, which live and die together.

They come from torch-pruning's dependency graph, so flatten, pooling, normalisation and residual additions are
followed and no layer name is special. What is found is tried out before it is believed: a smaller copy must give
what the masked model gives. What cannot be followed or cut is left whole, and ``left_whole`` says why.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

from fedcover.errors import InputError
from fedcover.seeding import ambient
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.dependency_graph import read_graph
from fedcover.structure.units.group import Member, UnitGroup, layer_of
from fedcover.structure.units.slicing import Cuts, cut, cuts_of, shape_after, smaller_copy
from fedcover.structure.units.verify import verify_groups

__all__ = [
    "UnitStructure",
    "Cuts",
    "Member",
    "UnitGroup",
    "unit_structure",
    "cut",
    "cuts_of",
    "find_groups",
    "groups_for",
    "layer_of",
    "shape_after",
    "smaller_copy",
]


@dataclass(frozen=True)
class UnitStructure:
    """The units of a network, and the layers without any, each with the reason."""

    groups: tuple[UnitGroup, ...]
    left_whole: dict[str, str]


_known: "WeakKeyDictionary[nn.Module, UnitStructure]" = WeakKeyDictionary()


def unit_structure(structure: ModelStructure) -> UnitStructure:
    """The hidden unit groups of a network in order of use, and what is left whole; found once for each network."""
    if structure.model not in _known:
        with ambient(0, "find units"):
            found, whole = read_graph(structure)
            groups, faults = verify_groups(structure, found)
        followed = {member.tensor for group in groups for member in group.members if member.incoming}
        layers = [layer_of(name) for name in structure.hidden if name not in followed]
        reasons = {**whole, **faults}
        left = {layer: reasons.get(layer, "its units could not be followed through the network") for layer in layers}
        _known[structure.model] = UnitStructure(groups, left)
    return _known[structure.model]


def find_groups(structure: ModelStructure) -> tuple[UnitGroup, ...]:
    """The hidden unit groups of a network, in order of use; the output layer's units are not among them."""
    return unit_structure(structure).groups


def groups_for(policy: object, structure: ModelStructure) -> tuple[UnitGroup, ...]:
    """The same for a policy that needs some: an error that says why there are none, and what would work."""
    found = unit_structure(structure)
    if found.groups:
        return found.groups
    name = type(structure.model).__name__
    if not found.left_whole:
        raise InputError(
            f"{policy} finds nothing to prune in {name}: it has one layer, the output, which stays whole; add a hidden"
            f" layer or use the policy 'full'"
        )
    layer, why = next(iter(found.left_whole.items()))
    raise InputError(
        f"{policy} prunes whole units and finds none in {name} that it could: '{layer}' stays whole, since {why}; use a"
        f" policy of single weights, such as WP, or 'full'"
    )
