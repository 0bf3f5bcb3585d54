"""Reader of torch-pruning's dependency graph: the indices of each tensor that belong to one unit."""

import copy
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.data.inputs import copy_of
from fedcover.errors import check_extra
from fedcover.structure.calls import call_model
from fedcover.structure.dispatch import Watch
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units.group import Member, UnitGroup, layer_of
from fedcover.structure.units.layers import axes_of, channels_of_group
from fedcover.structure.units.walk_limits import limit_walk

Split = tuple[int, ...]
"""The sizes of the parts into which a view splits an axis, such as (heads, channels of a head)."""
TIME_LIMIT = 60.0
"""Seconds that torch-pruning may take to follow the units of a model."""


@dataclass(frozen=True)
class CandidateGroup:
    """A group of units as the graph gives it, before it is verified."""

    finest: UnitGroup
    """The group with the smallest units, one for each output of its layer."""
    splits: tuple[Split, ...]
    """The ways in which later operations split the layer's outputs, as into attention heads."""

    def coarser(self) -> Iterator[UnitGroup]:
        """Yield the group with larger units, the smallest first: units that share some coordinates of a split."""
        mergers = {
            (math.prod(split[axis] for axis in axes), split, axes)
            for split in self.splits
            for count in range(1, len(split))
            for axes in combinations(range(len(split)), count)
        }
        for size, split, axes in sorted(mergers, reverse=True):
            unit = torch.zeros(split, dtype=torch.long)
            for axis in axes:
                along = torch.arange(split[axis]).reshape([-1 if a == axis else 1 for a in range(len(split))])
                unit = unit * split[axis] + along
            yield merge(self.finest, unit.flatten(), size)


def merge(group: UnitGroup, unit: Tensor, size: int) -> UnitGroup:
    """Return a group of ``size`` units in which unit u of the given group is part of unit ``unit[u]``."""
    members = tuple(replace(member, units=unit[member.units]) for member in group.members)
    return replace(group, size=size, members=members)


def read_graph(structure: ModelStructure) -> tuple[list[CandidateGroup], dict[str, str]]:
    """Return the groups of the graph, in order of use, and the layers whose units cannot be cut, with the reason."""
    check_extra("units", "pruning whole units", "torch_pruning")
    import torch_pruning

    model = copy.deepcopy(structure.model).eval()
    for parameter in model.parameters():  # the graph is that of autograd, which does not record frozen layers
        if parameter.is_floating_point():
            parameter.requires_grad_()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch_pruning.DependencyGraph().build_dependency(
                model, example_inputs=copy_of(structure.example), forward_fn=call_model
            )
            limit_walk(graph, TIME_LIMIT)
            listed = [list(group) for group in graph.get_all_groups()]
    except Exception as error:
        reason = f"no units were found: {str(error).partition(chr(10))[0] or type(error).__name__}"
        return [], {layer_of(name): reason for name in structure.hidden}
    reader = _Reader(model, structure)
    groups: list[UnitGroup] = []
    left: dict[str, str] = {}
    for items in listed:
        group = reader.read(items)
        if isinstance(group, str):
            left |= dict.fromkeys(reader.layers(items), group)
        elif group is not None:
            groups.append(group)
    order = {name: i for i, name in enumerate(structure.weights)}
    groups.sort(key=lambda g: min(order.get(m.tensor, len(order)) for m in g.members if m.incoming))
    splits = _splits(structure)
    return [CandidateGroup(group, tuple(s for s in splits if math.prod(s) == group.size)) for group in groups], left


class _Reader:
    """Converts torch-pruning's groups to ``UnitGroup``."""

    def __init__(self, model: nn.Module, structure: ModelStructure) -> None:
        self._structure = structure
        self._names: dict[Any, str] = {module: name for name, module in model.named_modules()}
        self._parameters = {id(tensor): name for name, tensor in model.named_parameters()}
        every = list(model.named_parameters(remove_duplicate=False))
        self._tied = {name: self._parameters[id(tensor)] for name, tensor in every}

    def layers(self, items: Sequence[Any]) -> list[str]:
        """Return the layers whose outputs belong to a group."""
        out = [item.dep.target.module for item in items if item.dep.handler.__name__.endswith("out_channels")]
        return [self._names[module] for module in out if module in self._names]

    def read(self, items: Sequence[Any]) -> UnitGroup | str | None:
        """Return a group, the reason why it cannot be cut, or None for the output layer's, which is never cut."""
        members: list[Member] = []
        root, size, together = "", max(max(item.root_idxs) for item in items) + 1, 1
        for item in items:
            module = item.dep.target.module
            out = item.dep.handler.__name__.endswith("out_channels")
            if isinstance(module, nn.Parameter):
                name = self._parameters[id(module)]
                tensors = {name: _axis_of_length(module, len(item.idxs))}
            elif module in self._names and any(True for _ in module.parameters(recurse=False)):
                name = self._names[module]
                axes = axes_of(module, out)
                if axes is None:
                    return f"its units pass through '{name}', a {type(module).__name__}, which cannot be cut"
                tensors = {f"{name}.{kind}" if name else kind: axis for kind, axis in axes.items()}
                root = root or name
                together = math.lcm(together, channels_of_group(module))
            else:
                continue  # an operation without parameters, such as ReLU or pooling
            for tensor, axis in tensors.items():
                if tensor not in self._tied:
                    continue  # such as the bias of a layer without one
                if tensor == self._structure.output and axis == 0 and out:
                    return None
                if list(self._tied.values()).count(self._tied[tensor]) > 1:
                    return f"'{tensor}' is tied to another layer's"
                units = self._units(tensor, axis, item)
                if units is None:
                    return f"its units could not be followed into '{tensor}'"
                members.append(Member(tensor, axis, units, out and len(self._structure.shapes[tensor]) > 1))
        if not any(member.incoming for member in members):
            return None
        group = UnitGroup(root, size, tuple(members))
        if together > 1:
            if size % together:
                return f"its {size} units do not form whole groups of {together}, as a group norm needs"
            group = merge(group, torch.arange(size) // together, size // together)
        return group

    def _units(self, tensor: str, axis: int, item: Any) -> Tensor | None:
        shape = self._structure.shapes[tensor]
        indices, roots = torch.tensor(item.idxs), torch.tensor(item.root_idxs)
        if axis >= len(shape) or len(indices) != len(roots) or int(indices.max()) >= shape[axis]:
            return None
        units = torch.full((shape[axis],), -1, dtype=torch.long)
        units[indices] = roots
        return None if bool((units < 0).any()) else units


def _axis_of_length(parameter: nn.Parameter, length: int) -> int:
    """Return the last axis of this length, along which the units of a free parameter lie."""
    return max((axis for axis, size in enumerate(parameter.shape) if size == length), default=parameter.ndim)


class _Views(Watch):
    """Records the parts into which views split an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.splits: dict[Split, None] = {}

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record a view."""
        if func in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            before, after = tuple(args[0].shape), tuple(out.shape)
            for start in range(len(before)):
                if before[:start] != after[:start] or start >= len(after):
                    break
                tail = len(before) - start - 1
                parts = after[start : len(after) - tail] if tail else after[start:]
                rest = after[start + len(parts) :]
                if len(parts) > 1 and math.prod(parts) == before[start] and before[start + 1 :] == rest:
                    self.splits[parts] = None


def _splits(structure: ModelStructure) -> list[Split]:
    """Return the splits of axes in a forward pass, those with the most parts first."""
    watch = _Views()
    with torch.no_grad(), watch:
        call_model(copy.deepcopy(structure.model).eval(), copy_of(structure.example))
    return sorted((s for s in watch.splits if 1 not in s), key=len, reverse=True)
