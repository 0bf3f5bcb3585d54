"""Units: the entries that one neuron or channel owns, which live and die together.

They come from torch-pruning's dependency graph, so flatten, pooling and residual additions are
followed and no layer name is special.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedcover.errors import InputError
from fedcover.network import Network
from fedcover.params import Params


@dataclass(frozen=True)
class Member:
    """One axis of one tensor, and the unit that each of its indices belongs to."""

    tensor: str
    axis: int
    units: Tensor
    incoming: bool
    """Whether these are the weights into the unit (rather than its bias, or the weights out of it)."""


@dataclass(frozen=True)
class UnitGroup:
    """The units of one layer, or of several layers tied by a residual stream."""

    name: str
    size: int
    members: tuple[Member, ...]

    def incoming_norm(self, theta: Params) -> Tensor:
        """The L1 norm of each unit's incoming weights."""
        total = torch.zeros(self.size, dtype=torch.float64, device=next(iter(theta.values())).device)
        for member in self.members:
            if member.incoming:
                weight = theta[member.tensor].double().abs().movedim(member.axis, 0).flatten(1)
                total.index_add_(0, _on(member.units, total.device), weight.sum(1))
        return total

    def energy(self, theta: Params) -> Tensor:
        """The squared norm of all that each unit owns: what is lost without it."""
        total = torch.zeros(self.size, dtype=torch.float64, device=next(iter(theta.values())).device)
        for member in self.members:
            squares = theta[member.tensor].double().square().movedim(member.axis, 0).reshape(len(member.units), -1)
            total.index_add_(0, _on(member.units, total.device), squares.sum(1))
        return total

    def restrict(self, mask: dict[str, Tensor], theta: Params, held: Tensor) -> None:
        """Narrow a mask, in place, to the units that are held."""
        for member in self.members:
            tensor = theta[member.tensor]
            shape = [1] * tensor.ndim
            shape[member.axis] = -1
            along = held[_on(member.units, held.device)].reshape(shape)
            known = mask.get(member.tensor)
            mask[member.tensor] = along.expand(tensor.shape).clone() if known is None else known & along


@lru_cache(maxsize=256)
def _on(units: Tensor, device: torch.device) -> Tensor:
    """Indices on a device, moved there once."""
    return units.to(device)


def find_groups(network: Network) -> tuple[UnitGroup, ...]:
    """The hidden unit groups of a network, in order of use; the output layer's units are not among them.

    A group with a member that is no linear, convolution or normalisation layer is left out: its
    units stay whole.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise InputError("pruning whole units needs torch-pruning; run `pip install torch-pruning`") from error
    model = copy.deepcopy(network.model).eval()
    with torch.enable_grad():
        graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=network.example)
        names = {module: name for name, module in model.named_modules()}
        groups = [_read_group(list(group), names, network) for group in graph.get_all_groups()]
    order = {name: i for i, name in enumerate(network.weights)}
    found = [g for g in groups if g is not None]
    found.sort(key=lambda g: min(order.get(m.tensor, len(order)) for m in g.members if m.incoming))
    return tuple(found)


def _read_group(items: Sequence[object], names: dict[nn.Module, str], network: Network) -> UnitGroup | None:
    members: list[Member] = []
    root = ""
    size = 0
    for item in items:
        dep, indices, roots = item.dep, item.idxs, item.root_idxs  # type: ignore[attr-defined]
        module = dep.target.module
        if module not in names or not any(True for _ in module.parameters(recurse=False)):
            continue  # an operation without parameters, such as ReLU or pooling
        out = dep.handler.__name__.endswith("out_channels")
        axes = _axes(module, out)
        if axes is None:
            return None
        prefix = names[module] + "." if names[module] else ""
        root, size = root or names[module], max(size, max(roots) + 1)
        for kind, axis in axes.items():
            tensor = prefix + kind
            if tensor not in network.shapes:
                continue
            if tensor == network.output and axis == 0:
                return None
            units = torch.full((network.shapes[tensor][axis],), -1, dtype=torch.long)
            units[torch.tensor(indices)] = torch.tensor(roots)
            if bool((units < 0).any()):
                return None
            incoming = out and len(network.shapes[tensor]) > 1
            members.append(Member(tensor, axis, units, incoming))
    if not any(member.incoming for member in members):
        return None
    return UnitGroup(root, size, tuple(members))


def _axes(module: nn.Module, out: bool) -> dict[str, int] | None:
    """Which axis of which of a layer's tensors its output (or input) units lie along."""
    if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if getattr(module, "groups", 1) != 1:
            return None
        return {"weight": 0, "bias": 0} if out else {"weight": 1}
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm):
        return {"weight": 0, "bias": 0}
    return None
