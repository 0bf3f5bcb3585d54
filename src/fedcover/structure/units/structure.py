"""The unit structure of a model: its groups of units, and the layers without units."""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from torch import nn

from fedcover.errors import InputError
from fedcover.seeding import ambient
from fedcover.structure.calls import first_line
from fedcover.structure.trace import ModelStructure, hidden_weights
from fedcover.structure.units.candidates import Reader
from fedcover.structure.units.group import UnitGroup, layer_of
from fedcover.structure.units.tracing import CannotRunError, follow_units
from fedcover.structure.units.verify import verify_groups

TOGETHER = "its outputs can only be removed all together, as those of one normalisation group"
UNUSED = "the outputs of the model do not depend on it"


@dataclass(frozen=True)
class UnitStructure:
    """The groups of units of a model, and the layers without units."""

    groups: tuple[UnitGroup, ...]
    """Groups of hidden units, in order of use; the units of the output layer are not among them."""
    left_whole: dict[str, str]
    """Hidden layers whose units cannot be removed, with the reason."""


_CACHE: "WeakKeyDictionary[nn.Module, UnitStructure]" = WeakKeyDictionary()


def unit_structure(structure: ModelStructure) -> UnitStructure:
    """Return the unit structure of a model, which is computed once for each model; of it, the selected layers."""
    if structure.model not in _CACHE:
        _CACHE[structure.model] = _find_units(replace(structure, selected=None))
    units = _CACHE[structure.model]
    if structure.selected is None:
        return units
    hidden = {layer_of(name) for name in structure.hidden}
    groups = tuple(
        group for group in units.groups if all(structure.selects(m.tensor) for m in group.members if m.incoming)
    )
    return UnitStructure(groups, {layer: reason for layer, reason in units.left_whole.items() if layer in hidden})


def _find_units(structure: ModelStructure) -> UnitStructure:
    """Return the unit structure of a model; all its layers stay whole, with the reason, if the analysis fails."""
    try:
        with ambient(0, "find units"):
            return _verified_units(structure)
    except CannotRunError as error:
        reason = str(error)
    except Exception as error:
        reason = f"fedcover's search for units fails with '{first_line(error)}', which is a defect of fedcover"
    return UnitStructure((), {layer_of(name): reason for name in structure.hidden})


def _verified_units(structure: ModelStructure) -> UnitStructure:
    """Return the groups that a dry run confirms, and why the other layers stay whole."""
    labels = follow_units(structure)
    reader = Reader(structure, labels)
    groups, faults = verify_groups(structure, reader.candidates(), labels.modes)
    inseparable = {
        layer_of(member.tensor): TOGETHER
        for group in groups
        for member in group.members
        if group.size == 1 and member.incoming and len(member.units) > 1
    }
    groups = tuple(group for group in groups if group.name not in inseparable)
    followed = {member.tensor for group in groups for member in group.members if member.incoming}
    layers = [layer_of(name) for name in structure.hidden if name not in followed]
    reasons = {**reader.reasons(), **faults, **inseparable}
    return UnitStructure(groups, {layer: reasons.get(layer, UNUSED) for layer in layers})


def find_groups(structure: ModelStructure) -> tuple[UnitGroup, ...]:
    """Return the groups of hidden units of a model, in order of use."""
    return unit_structure(structure).groups


def groups_for(policy: object, structure: ModelStructure) -> tuple[UnitGroup, ...]:
    """Return the groups of hidden units for a policy that needs at least one.

    Args:
        policy: The policy or its name, for the message.
        structure: Structure of the model.

    Raises:
        InputError: If there is no group; the message gives the reason and an alternative.
    """
    units = unit_structure(structure)
    if units.groups:
        return units.groups
    hidden_weights(structure, policy)  # raises if there is no hidden layer
    if not units.left_whole:
        raise InputError(
            f"{policy} prunes whole units, and every group of units has a layer that only and skip leave out; select"
            f" all layers that share their units, or use a policy of single weights, such as WP"
        )
    layer, reason = next(iter(units.left_whole.items()))
    raise InputError(
        f"{policy} prunes whole units, and {type(structure.model).__name__} has none that can be removed: '{layer}'"
        f" stays whole, since {reason}; use a policy of single weights, such as WP, or 'full'"
    )
