"""Smaller models: the units that a mask removes whole are cut out of the module itself.

Shrinking is only an optimisation: training the smaller module under the mask that is left over gives what
training the whole one under the whole mask gives. Dropout draws for fewer units: there, in distribution.
"""

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedcover.network import Network
from fedcover.params import Mask, Params, check_mask, prune, put_params
from fedcover.seeding import ambient, generator
from fedcover.threads import one_thread
from fedcover.units import UnitGroup, find_groups

Cuts = Mapping[str, Mapping[int, Tensor]]
"""For each tensor that is cut, the indices that stay along each axis."""

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_SIZES = {"out_features": 0, "in_features": 1, "out_channels": 0, "in_channels": 1}
_MIXED = "its outputs differ; units are mixed on their way, as by a softmax"


@dataclass(frozen=True, eq=False)
class SubModel:
    """A smaller module, and what is needed to go from theta to its parameters and back.

    >>> from fedcover.network import trace
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> first = torch.tensor([True, False, False])
    >>> mask = {"0.weight": first[:, None].expand(3, 4), "0.bias": first, "2.weight": first.expand(2, 3)}
    >>> sub = Shrinker(trace(net, torch.zeros(2, 4))).shrink(mask)
    >>> theta = {name: torch.ones_like(tensor) for name, tensor in net.state_dict().items()}
    >>> sub.cut(theta)["2.weight"].tolist(), sub.restore(sub.cut(theta), theta)["2.weight"].tolist()
    ([[1.0], [1.0]], [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    """

    source: nn.Module
    """The whole model that it is cut from."""
    mask: Mask
    """What the mask still removes, in the small shapes; empty if nothing."""
    cuts: Cuts
    macs: float
    """Multiply-adds of one example's forward pass through the smaller module."""
    shape_key: tuple[tuple[int, ...], ...]
    """The shapes of the small parameters: equal for sub-models of one network that can share a module."""

    @cached_property
    def model(self) -> nn.Module:
        """The smaller module, made when it is first asked for; its parameters are its own."""
        return _build(self.source, self.cuts)

    def cut(self, theta: Mapping[str, Tensor]) -> Params:
        """The small model's part of theta, copied; the mask that is left over is not applied."""
        return {name: _cut(tensor, self.cuts.get(name)) for name, tensor in theta.items()}

    def restore(self, small: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Params:
        """The small parameters at their places in tensors shaped as in ``like``, and exactly zero elsewhere."""
        full = {name: small[name].clone() for name in like}
        for name, axes in self.cuts.items():
            for axis, kept in axes.items():
                values, shape = full[name], list(full[name].shape)
                shape[axis] = like[name].shape[axis]
                full[name] = values.new_zeros(shape).index_copy_(axis, kept.to(values.device), values)
        return full


class Shrinker:
    """Makes the sub-models of one network. ``left_whole`` tells which layers it never cuts, and why.

    >>> from fedcover.models import MLP; from fedcover.network import trace
    >>> shrinker = Shrinker(trace(MLP(), torch.zeros(2, 1, 28, 28)))
    >>> first = torch.arange(200) < 50
    >>> mask = {"fc1.weight": first[:, None].expand(200, 784), "fc1.bias": first, "fc2.weight": first.expand(10, 200)}
    >>> shrinker.shrink(mask).model.fc2, dict(shrinker.shrink(mask).mask), shrinker.left_whole
    (Linear(in_features=50, out_features=10, bias=True), {}, {})
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._shapes = {name: torch.empty(shape, device="meta") for name, shape in network.shapes.items()}
        try:
            with ambient(0, "find units"):
                found, why = find_groups(network), "its units could not be followed through the network"
        except Exception as error:  # an optimisation must not stop a run
            found, why = (), "no units were found: " + str(error).partition("\n")[0]
        followed = {member.tensor for group in found for member in group.members if member.incoming}
        self.left_whole = {_layer(name): why for name in network.hidden if name not in followed}
        self.groups = found
        if found and _fault(network, found):  # not all together: so one after another
            self.groups = ()
            for group in found:
                if fault := _fault(network, (*self.groups, group)):
                    self.left_whole[group.name] = fault
                else:
                    self.groups += (group,)

    def shrink(self, mask: Mask) -> SubModel:
        """The sub-model without the units of which the mask removes every entry: weights in, bias, weights out."""
        meta = {name: kept.to("meta") if isinstance(kept, Tensor) else kept for name, kept in mask.items()}
        check_mask(meta, self._shapes, "the mask to shrink by")
        cuts = _cuts(self.groups, mask)
        shapes = {name: _shape_after(shape, cuts.get(name)) for name, shape in self._network.shapes.items()}
        left = {name: _cut(kept, cuts[name]) if name in cuts else kept for name, kept in mask.items()}
        left = {name: kept for name, kept in left.items() if not bool(kept.all())}
        macs = sum(math.prod(shape) * self._network.macs[name] for name, shape in shapes.items())
        return SubModel(self._network.model, left, cuts, macs, tuple(shapes.values()))


def _cuts(groups: Sequence[UnitGroup], mask: Mask) -> Cuts:
    """The indices that stay, along each axis on which a mask removes whole units."""
    cuts: dict[str, dict[int, Tensor]] = {}
    for group in groups:
        if not all(member.tensor in mask for member in group.members):
            continue
        alive = torch.zeros(group.size, dtype=torch.bool)
        for member in group.members:
            kept = mask[member.tensor].movedim(member.axis, 0).reshape(len(member.units), -1).any(1)
            alive[member.units[kept.cpu()]] = True
        if not bool(alive.any()):
            alive[0] = True  # a layer must have a unit; the mask that is left over removes it
        if not bool(alive.all()):
            for member in group.members:
                cuts.setdefault(member.tensor, {})[member.axis] = alive[member.units].nonzero().squeeze(1)
    return cuts


def _shape_after(shape: Sequence[int], axes: Mapping[int, Tensor] | None) -> tuple[int, ...]:
    return tuple(len(axes[axis]) if axes and axis in axes else size for axis, size in enumerate(shape))


def _cut(tensor: Tensor, axes: Mapping[int, Tensor] | None) -> Tensor:
    """A contiguous copy of what stays of a tensor."""
    for axis, kept in (axes or {}).items():
        tensor = tensor.index_select(axis, kept.to(tensor.device))
    return tensor if axes else tensor.clone(memory_format=torch.contiguous_format)


def _build(model: nn.Module, cuts: Cuts) -> nn.Module:
    """A copy of a model that holds only what the cuts leave."""
    # What is in the memo, deepcopy takes for copied: whole tensors are never copied, tied ones stay tied.
    memo: dict[int, object] = {
        id(tensor): nn.Parameter(_cut(tensor.detach(), cuts.get(name)), tensor.requires_grad)
        for name, tensor in model.named_parameters()
    }
    small = copy.deepcopy(model, memo)
    for name in cuts:
        layer = small.get_submodule(_layer(name))
        for attribute in _SIZES.keys() & vars(layer).keys():
            setattr(layer, attribute, layer.get_parameter("weight").shape[_SIZES[attribute]])
    return small


def _fault(network: Network, groups: Sequence[UnitGroup]) -> str:
    """Why these groups cannot be cut together, by dry runs against the masked model; empty if they can.

    Parameters are random, since an output layer that starts at zero would hide every fault.
    """
    for name in {_layer(member.tensor): None for group in groups for member in group.members}:
        layer = network.model.get_submodule(name)
        if not isinstance(layer, _LAYERS):
            return f"its units pass through '{name}', a {type(layer).__name__}"
    rng = generator(0, "dry run")
    orders = [torch.randperm(group.size, generator=rng) for group in groups]
    theta = {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) / math.sqrt(math.prod(shape[1:]))
        for name, shape in network.shapes.items()
    }
    try:
        with torch.no_grad(), one_thread(), ambient(0, "dry run"):
            dense, inputs, tolerance = _rehearsal(network)
            for pattern in range(3):
                mask: dict[str, Tensor] = {}
                for group, order in zip(groups, orders, strict=True):
                    group.restrict(mask, theta, order < (max(1, group.size - 1), (group.size + 1) // 2, 1)[pattern])
                put_params(dense, prune(theta, mask))
                small = _build(dense, _cuts(groups, mask))
                expected = dense(inputs)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    got = small(inputs)
                torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance, msg=_MIXED)
    except Exception as error:
        return "a smaller copy fails a dry run: " + str(error).partition("\n")[0]
    return ""


def _rehearsal(network: Network) -> tuple[nn.Module, Tensor, float]:
    """A copy of the model in evaluation mode, inputs that are not blank, and how well results must agree."""
    model, inputs = copy.deepcopy(network.model).eval(), network.example
    if inputs.is_floating_point() and not bool(inputs.any()):
        inputs = torch.rand_like(inputs)
    try:
        double, precise = copy.deepcopy(model).double(), inputs.double() if inputs.is_floating_point() else inputs
        double(precise)
        return double, precise, 1e-8
    except Exception:  # such as a module that makes its input float32
        return model, inputs, math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in model.parameters()))


def _layer(tensor: str) -> str:
    return tensor.rpartition(".")[0]
