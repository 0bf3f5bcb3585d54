"""The use that a model makes of its parameters, observed in one forward pass.

No layer name or layer type is special: a parameter is recognised by its storage, wherever it is used.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from fedcover.data.inputs import Inputs, copy_of, count, join, map_inputs, parts_of, shapes, take
from fedcover.errors import InputError
from fedcover.params import Mask, axes_of, numbers
from fedcover.seeding import seeded
from fedcover.structure.calls import call_model, call_with
from fedcover.structure.dispatch import Watch, unfused
from fedcover.structure.exits import ExitModel, limit_exits, with_prediction
from fedcover.structure.state import copy_model, moving_buffers


@dataclass(frozen=True)
class ModelStructure:
    """The facts about a model that policies and costs need; ``trace`` returns it."""

    model: nn.Module
    """A copy of the model, on the CPU."""
    example: Inputs
    """Two inputs, on which the model can run; pass a copy, since a model may write to its input."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of each parameter, by name."""
    weights: tuple[str, ...]
    """Names of the tensors of two or more axes, in order of use."""
    output: str
    """Name of the weight tensor used last: the output layer's."""
    macs: Mapping[str, float]
    """Multiply-adds that one entry of a tensor takes part in, in the forward pass of one example."""
    first: frozenset[str]
    """Tensors that are multiplied with the raw input, for which training needs no gradient towards the input."""
    uncounted: tuple[str, ...]
    """Weight tensors whose multiply-adds could not be counted, as in a matrix power; ``macs`` is 0 for them."""
    moving: tuple[str, ...]
    """Buffers that a forward pass in training mode changes, such as running statistics."""
    largest_value: int = 0
    """Entries, per example, of the largest tensor that an operation of the forward pass returns."""
    frozen: frozenset[str] = frozenset()
    """Parameters that are never trained, since they do not require gradients."""

    selected: frozenset[str] | None = None
    """Parameters that may be pruned, from ``only`` and ``skip``; None for all."""
    order: tuple[str, ...] = ()
    """Names of all parameters in order of use; those that the forward pass does not use come last."""
    exits: tuple[frozenset[str], ...] = ()
    """For each exit the names of the parameters that its scores depend on; empty for a model without exits."""
    heads: tuple[str, ...] = ()
    """For each exit the name of the weight tensor used last; empty for a model without exits."""
    _firsts: dict[frozenset[str], frozenset[str]] = field(default_factory=dict, repr=False, compare=False)
    """What ``first_without`` returned."""

    @property
    def hidden(self) -> tuple[str, ...]:
        """The weight tensors that may be pruned: all but the output layers', and of these the selected ones."""
        outputs = {self.output, *self.heads}
        return tuple(name for name in self.weights if name not in outputs and self.selects(name))

    @property
    def work(self) -> float:
        """The multiply-adds of the forward pass of one example."""
        return self.work_of(self.shapes)

    def first_without(self, untrained: frozenset[str]) -> frozenset[str]:
        """Return the tensors for which training needs no gradient towards the input, if some tensors are not trained.

        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> structure = trace(model, torch.zeros(2, 4))
        >>> sorted(structure.first), sorted(structure.first_without(frozenset({"0.weight", "0.bias"})))
        (['0.weight'], ['0.weight', '2.weight'])
        """
        if not untrained - self.frozen:
            return self.first
        if untrained not in self._firsts:
            self._firsts[untrained] = _first_without(self, untrained)
        return self._firsts[untrained]

    def work_of(self, shapes: Mapping[str, Sequence[int]]) -> float:
        """Return the multiply-adds of one example, with smaller tensors of these shapes."""
        return sum(math.prod(shape) * self.macs[name] for name, shape in shapes.items())

    def exits_in(self, mask: Mask) -> tuple[int, ...]:
        """Return the numbers of the exits that a mask leaves: it keeps something of every weight that they depend on.

        They are all exits if no exit is left, and none for a model without exits.
        """
        if not self.exits:
            return ()
        axes, weights = axes_of(mask), [name for name in self.weights if name in mask]
        product = {name: all(kept.any() for kept in axes[name].values()) for name in weights if name in axes}
        others = [name for name in weights if name not in product]
        kept = {**product, **dict(zip(others, numbers([mask[name].any() for name in others]), strict=True))}
        empty = {name for name, some in kept.items() if not some}
        left = tuple(number for number, tensors in enumerate(self.exits, start=1) if not tensors & empty)
        return left or tuple(range(1, len(self.exits) + 1))

    def selects(self, parameter: str) -> bool:
        """Return whether a parameter is selected."""
        return self.selected is None or parameter in self.selected


_VIEWS = ("view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "t", "transpose", "permute")
_LIGHT = ("add", "sub", "mul", "div", "embedding", "index", "detach", "alias", "clone")
_WITHOUT_PRODUCTS = frozenset(getattr(torch.ops.aten, name) for name in _VIEWS + _LIGHT)
"""Operations without a matrix product: a parameter used only by these has no multiply-adds to count."""


def _storage(tensor: Tensor) -> int | None:
    """Return the address of a tensor's memory; None for a sparse tensor, which has no single one."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else None


class _ParameterWatch(Watch):
    """Records the operations that each parameter takes part in."""

    def __init__(self, model: nn.Module) -> None:
        from torch.utils.flop_counter import flop_registry  # here, since it imports Triton where that is installed

        super().__init__()
        self._flops = flop_registry
        self._names = {_storage(p): name for name, p in model.named_parameters() if p.numel()}
        self.order: dict[str, None] = {}
        self.multiplies: dict[str, None] = {}
        self.macs: dict[str, float] = {}
        self.first: set[str] = set()
        self.elsewhere: set[str] = set()
        self.largest_value = 0

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record one operation."""
        values = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self.largest_value = max(self.largest_value, *(v.numel() for v in values if _storage(v) not in self._names), 0)
        tensors = [a for a in args if isinstance(a, Tensor)]
        named = [(self._names.get(_storage(t)), t) for t in tensors]
        for name, _ in named:
            if name is not None:
                self.order.setdefault(name)
        flops = self._flops.get(func._overloadpacket)
        if flops is None and func._overloadpacket not in _WITHOUT_PRODUCTS:
            self.elsewhere |= {name for name, _ in named if name is not None}
        if flops is not None:
            for name, tensor in named:
                if name is None or tensor.ndim < 2:
                    continue
                total = flops(*args, **kwargs, out_val=out) / 2
                self.macs[name] = self.macs.get(name, 0.0) + total / tensor.numel()
                self.multiplies.pop(name, None)
                self.multiplies[name] = None
                if not any(t.requires_grad for other, t in named if other is None):
                    self.first.add(name)


def trace(model: nn.Module, example: Inputs) -> ModelStructure:
    """Return the structure of a model, from one forward pass on a copy of it.

    Args:
        model: Any module with at least one weight tensor of two or more axes; it is not changed.
        example: A batch of inputs; the first two are used.

    Raises:
        InputError: If the model cannot run on the example, has uninitialised parameters, or has nothing to train or
            to prune.

    >>> structure = trace(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(2, 4))
    >>> structure.hidden, structure.output, structure.macs["0.weight"]
    (('0.weight',), '2.weight', 1.0)
    """
    check_initialised(model)
    # Two examples, since batch norm refuses one; training mode, since evaluation may take fused paths in which
    # parameters cannot be told apart.
    two = take(example, slice(2)) if count(example) > 1 else join([example, example])
    example = map_inputs(lambda part: part.detach().cpu().clone(), two)
    unused = copy_model(model).cpu().train()
    scratch = copy.deepcopy(unused)  # it may keep values of the forward pass, which cannot be copied
    watch = _ParameterWatch(scratch)
    buffers = {name: buffer.clone() for name, buffer in scratch.named_buffers()}
    with seeded(0, "trace"), torch.enable_grad(), unfused(), watch:
        try:
            call_model(scratch, copy_of(example))  # a model may write to its input
        except InputError:
            raise
        except Exception as error:
            shape = shapes(example)
            raise InputError(
                f"the model cannot run on its data: a batch of shape {shape} gave '{error}'; check the shape that the"
                f" model expects"
            ) from error
    shape_of = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not shape_of:
        raise InputError(f"the model {type(model).__name__} has no parameters; there is nothing to train")
    names = [*watch.order, *(name for name in shape_of if name not in watch.order)]
    weights = tuple(name for name in names if len(shape_of[name]) > 1)
    if not weights:
        raise InputError(f"the model {type(model).__name__} has no weight matrix; there is nothing to prune")
    return ModelStructure(
        model=unused,
        example=example,
        shapes=shape_of,
        weights=weights,
        output=next(reversed(watch.multiplies), weights[-1]),
        macs={name: watch.macs.get(name, 0.0) / count(example) for name in shape_of},
        first=frozenset(watch.first),
        uncounted=tuple(name for name in weights if name in watch.elsewhere and not watch.macs.get(name)),
        moving=moving_buffers(scratch, buffers, example),
        largest_value=watch.largest_value // count(example),
        frozen=frozenset(name for name, p in model.named_parameters() if not p.requires_grad),
        order=tuple(names),
        **_exits(unused, example),
    )


def _exits(model: nn.Module, example: Inputs) -> dict[str, Any]:
    """Return the fields of a structure about the exits of a model, from a forward pass up to each of them."""
    if not isinstance(model, ExitModel):
        return {}
    tensors, heads = [], []
    for number in range(1, model.depth + 1):
        scratch = copy.deepcopy(model)
        limit_exits(scratch, [number])
        watch = _ParameterWatch(scratch)
        with seeded(0, "trace"), torch.enable_grad(), unfused(), watch:
            call_model(scratch, copy_of(example))
        tensors.append(frozenset(watch.order))
        heads.append(next(reversed(watch.multiplies)))
    return {"exits": tuple(tensors), "heads": tuple(heads)}


def _first_without(structure: ModelStructure, untrained: frozenset[str]) -> frozenset[str]:
    """Return ``first`` of a model of which some tensors are not trained, from another forward pass."""
    scratch = copy.deepcopy(structure.model)
    for name, parameter in scratch.named_parameters():
        parameter.requires_grad_(name not in untrained and name not in structure.frozen)
    watch = _ParameterWatch(scratch)
    with seeded(0, "trace"), torch.enable_grad(), unfused(), watch:
        call_model(scratch, copy_of(structure.example))
    return frozenset(watch.first)


def check_initialised(model: nn.Module) -> None:
    """Raise InputError if a parameter or buffer has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"'{name}' has no shape yet, as in nn.LazyLinear; call the model once on a batch of inputs before it is"
                f" given to fedcover"
            )


def hidden_weights(structure: ModelStructure, policy: object) -> tuple[str, ...]:
    """Return the names of the weight tensors that a policy may prune: all but the output layer's.

    Args:
        structure: Structure of the model.
        policy: The policy or its name, for the message.

    Raises:
        InputError: If the output layer is the only one.

    >>> hidden_weights(trace(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.zeros(2, 4)), "WP")
    ('0.weight',)
    """
    if not structure.hidden:
        raise InputError(
            f"{policy} finds nothing to prune in {type(structure.model).__name__}: its only layer is the output, which"
            f" stays whole; add a hidden layer or use the policy 'full'"
        )
    return structure.hidden


def carries(structure: ModelStructure, theta: Mapping[str, Tensor]) -> bool:
    """Return whether the output depends on the input (False if a mask removed a whole layer on the only path).

    Args:
        structure: Structure of the model.
        theta: Parameters, with zeros where a mask removed them.

    >>> structure = trace(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), torch.zeros(2, 4))
    >>> theta = {name: torch.ones(shape) for name, shape in structure.shapes.items()}
    >>> carries(structure, theta), carries(structure, {**theta, "0.weight": torch.zeros(3, 4)})
    (True, False)
    """
    # Of a model with exits, one of them is enough.
    model, example = with_prediction(copy.deepcopy(structure.model), "mean").eval(), structure.example
    rng = torch.Generator().manual_seed(0)
    varied = map_inputs(
        lambda part: (
            torch.rand(part.shape, generator=rng).to(part.dtype) if part.is_floating_point() else torch.ones_like(part)
        ),
        example,
    )
    device = next(iter(parts_of(example).values())).device
    local = {name: tensor.to(device) for name, tensor in theta.items()}
    with torch.no_grad():
        blank_scores, varied_scores = (
            call_with(model, local, x) for x in (map_inputs(torch.zeros_like, example), varied)
        )
    return not torch.equal(blank_scores, varied_scores)
