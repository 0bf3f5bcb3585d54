"""What a network does with its parameters, found by watching one forward pass.

No layer names and no special layers: a parameter is known by its storage, wherever it is used.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedcover.errors import InputError


@dataclass(frozen=True)
class ModelStructure:
    """The facts about a module that policies and costs need."""

    model: nn.Module
    example: Tensor
    """Two inputs, enough to run the module on."""
    shapes: Mapping[str, tuple[int, ...]]
    weights: tuple[str, ...]
    """Tensors of two or more axes, in order of use."""
    output: str
    """The weight tensor used last: the output layer's."""
    macs: Mapping[str, float]
    """Multiply-adds that one entry of a tensor takes part in, for one example's forward pass."""
    first: frozenset[str]
    """Tensors that meet the raw input, for which training needs no gradient towards the input."""
    uncounted: tuple[str, ...]
    """Weight tensors whose multiply-adds could not be counted, as in an LSTM; ``macs`` has 0 for them."""
    moving: tuple[str, ...]
    """Buffers that a training pass changes, such as running statistics."""

    @property
    def hidden(self) -> tuple[str, ...]:
        """The weight tensors that may be pruned: all but the output layer's."""
        return tuple(name for name in self.weights if name != self.output)


_VIEWS = ("view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "t", "transpose", "permute")
_LIGHT = ("add", "sub", "mul", "div", "embedding", "index", "detach", "alias", "clone")
_WITHOUT_PRODUCTS = frozenset(getattr(torch.ops.aten, name) for name in _VIEWS + _LIGHT)
"""Operations that take part in no matrix product: a parameter met by these alone has no multiply-adds to count."""


class _Watch(TorchDispatchMode):
    """Notes, for each parameter, the operations that it takes part in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters() if p.numel()}
        self.order: dict[str, None] = {}
        self.multiplies: dict[str, None] = {}
        self.macs: dict[str, float] = {}
        self.first: set[str] = set()
        self.elsewhere: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, Tensor)]
        named = [(self._names.get(t.untyped_storage().data_ptr()), t) for t in tensors]
        for name, _ in named:
            if name is not None:
                self.order.setdefault(name)
        flops = flop_registry.get(func._overloadpacket)
        if flops is None and func._overloadpacket not in _WITHOUT_PRODUCTS:
            self.elsewhere |= {name for name, _ in named if name is not None}
        if flops is not None:
            for name, tensor in named:
                if name is None or tensor.ndim < 2:
                    continue
                total = flops(*args, **(kwargs or {}), out_val=out) / 2
                self.macs[name] = self.macs.get(name, 0.0) + total / tensor.numel()
                self.multiplies.pop(name, None)
                self.multiplies[name] = None
                if not any(t.requires_grad for other, t in named if other is None):
                    self.first.add(name)
        return out


def trace(model: nn.Module, example: Tensor) -> ModelStructure:
    """The facts about a module, from one forward pass on a copy of it; ``example`` is a batch of inputs.

    >>> net = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2, 4))
    >>> net.hidden, net.output, net.macs["0.weight"]
    (('0.weight',), '2.weight', 1.0)
    """
    # Two examples, since batch normalisation refuses one; training mode, since evaluation may take fused
    # paths in which parameters cannot be told apart.
    example = example[:2] if len(example) > 1 else torch.cat([example, example])
    scratch = copy.deepcopy(model).cpu().train()
    watch = _Watch(scratch)
    buffers = {name: buffer.clone() for name, buffer in scratch.named_buffers()}
    with torch.enable_grad(), watch:
        try:
            scratch(example.cpu())
        except Exception as error:
            shape = tuple(example.shape)
            raise InputError(f"the model cannot run on its data: a batch of shape {shape} gave '{error}'") from error
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not shapes:
        raise InputError(f"the model {type(model).__name__} has no parameters; there is nothing to train")
    names = [*watch.order, *(name for name in shapes if name not in watch.order)]
    weights = tuple(name for name in names if len(shapes[name]) > 1)
    if not weights:
        raise InputError(f"the model {type(model).__name__} has no weight matrix; there is nothing to prune")
    output = next((name for name in reversed(watch.multiplies)), weights[-1])
    macs = {name: watch.macs.get(name, 0.0) / len(example) for name in shapes}
    moving = tuple(name for name, buffer in scratch.named_buffers() if not torch.equal(buffer, buffers[name]))
    silent = tuple(n for n in weights if n in watch.elsewhere and not macs[n])
    return ModelStructure(scratch, example.cpu(), shapes, weights, output, macs, frozenset(watch.first), silent, moving)


def carries(structure: ModelStructure, theta: Mapping[str, Tensor]) -> bool:
    """Whether a network with these parameters tells inputs apart; it does not if a layer is gone that all pass through.

    >>> net = trace(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.zeros(2, 4))
    >>> theta = {name: torch.ones(shape) for name, shape in net.shapes.items()}
    >>> carries(net, theta), carries(net, {**theta, "0.weight": torch.zeros(3, 4)})
    (True, False)
    """
    model, like = copy.deepcopy(structure.model).eval(), structure.example
    rng = torch.Generator().manual_seed(0)
    other = torch.rand(like.shape, generator=rng).to(like.dtype) if like.is_floating_point() else torch.ones_like(like)
    here = {name: tensor.to(like.device) for name, tensor in theta.items()}
    with torch.no_grad():
        one, two = (functional_call(model, here, (inputs,)) for inputs in (torch.zeros_like(like), other))
    return not torch.equal(one, two)
