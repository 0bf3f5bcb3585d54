"""A forward pass on which every operation passes on the labels of units."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.data.inputs import copy_of
from fedcover.structure.calls import call_model
from fedcover.structure.dispatch import Watch, unfused
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import views  # noqa: F401  its rules are registered when it is imported
from fedcover.structure.units.labels import Factor, Ids, Ledger, Operand
from fedcover.structure.units.operations import ELEMENTWISE, FACTORIES, RULES, elementwise, factory, tensors_in, unknown
from fedcover.structure.units.reductions import spatial

OUTPUTS = "they are the model's outputs"
_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad")


class UnitTrace(Watch):
    """The labels of a model's parameters, and what a forward pass states about them.

    Args:
        model: A copy of the model; hooks are added to its modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.ids: dict[tuple[str, int], Ids] = {}
        """Labels of each axis of each parameter."""
        self.outer: set[tuple[str, int]] = set()
        """Axes of parameters that are not summed over: those of a layer's outputs."""
        self.origins: dict[int, str] = {}
        """The parameter that a tensor shows or is computed from, by the id of the tensor."""
        self._factors: dict[int, tuple[Tensor, tuple[Factor, ...]]] = {}
        self._modules: list[str] = ["the model"]
        self._tape: list[tuple[str, Any, dict[str, Any], Any]] = []
        self._owners: list[tuple[str, int]] = []
        for name, parameter in model.named_parameters():
            factors = []
            for axis, size in enumerate(parameter.shape):
                self.ids[name, axis] = self.ledger.fresh(size)
                self._owners += [(name, axis)] * size
                factors.append(Factor((axis,), self.ids[name, axis]))
            self.put(parameter, factors, name)
        for name, module in model.named_modules():
            title = f"'{name}', a {type(module).__name__}," if name else "the model"
            module.register_forward_pre_hook(lambda *_, title=title: self._modules.append(title))
            module.register_forward_hook(lambda *_: self._modules.pop() and None)

    def get(self, tensor: Tensor) -> tuple[Factor, ...]:
        """Return the labels of a tensor."""
        return self._factors.get(id(tensor), (tensor, ()))[1]

    def put(self, tensor: Tensor, factors: Iterable[Factor], origin: str | None = None) -> None:
        """Set the labels of a tensor."""
        self._factors[id(tensor)] = (tensor, tuple(factors))  # it is kept, so that no other gets its id
        if origin is not None:
            self.origins[id(tensor)] = origin

    def operand(self, tensor: Tensor, names: Sequence[Any]) -> Operand:
        """Return a tensor as an operand, with names of its axes."""
        factors = tuple(factor.renamed(dict(enumerate(names))) for factor in self.get(tensor))
        return Operand(dict(zip(names, tensor.shape, strict=True)), factors)

    def at(self, text: str) -> str:
        """Return a reason that begins with the module that runs."""
        return f"{self._modules[-1]} {text}"

    def used(self, tensors: Iterable[tuple[Tensor, Sequence[bool]]], smallest: int = 1) -> None:
        """Record the axes of parameters that a product leaves.

        Args:
            tensors: The operands, and for each of their axes whether the result has it.
            smallest: Size of the smallest axis that is recorded.
        """
        for tensor, left in tensors:
            origin = self.origins.get(id(tensor))
            for factor in self.get(tensor) if origin is not None else ():
                if factor.ids.size >= smallest and all(left[axis] for axis in factor.axes):
                    owners = {self._owners[i] for i in factor.ids.ravel().tolist() if i < len(self._owners)}
                    self.outer |= {owner for owner in owners if owner[0] == origin}

    def used_alone(self, tensors: Sequence[Tensor]) -> None:
        """Record parameters that meet other tensors index by index, such as learnt positions."""
        if any(id(tensor) not in self.origins for tensor in tensors):
            self.used(((tensor, [True] * tensor.ndim) for tensor in tensors), smallest=2)

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record an operation, and the module that runs."""
        names = [argument.name for argument in func._schema.arguments]
        self._tape.append((self._modules[-1], func, {**dict(zip(names, args, strict=False)), **kwargs}, out))

    def replay(self, scores: Tensor) -> None:
        """Pass on the labels through the operations on which the scores depend."""
        needed, tape = {id(scores)}, []
        for step in reversed(self._tape):
            _, func, args, out = step
            if func._schema.is_mutable or any(id(tensor) in needed for tensor in tensors_in(out)):
                needed |= {id(tensor) for tensor in tensors_in(list(args.values()))}
                tape.append(step)
        for module, func, args, out in reversed(tape):
            self._modules.append(module)
            self._pass_on(func, args, out)
            self._modules.pop()

    def _pass_on(self, func: Any, args: dict[str, Any], out: Any) -> None:
        packet = func._overloadpacket.__name__
        name = packet.removesuffix("_")
        if name in RULES:
            RULES[name](self, args, out)
        elif torch.Tag.pointwise in func.tags or name in ELEMENTWISE:
            elementwise(self, args, out)
        elif name in FACTORIES:
            factory(self, args, out)
        elif any(part in name for part in _SPATIAL):
            dimensions = next((int(d) for d in "123" if f"{d}d" in name), 2)
            spatial(self, args["self" if "self" in args else "input"], out, dimensions)
        else:
            unknown(self, name, args, out)


def follow_units(structure: ModelStructure) -> UnitTrace:
    """Return the labels of a model's parameters after a forward pass on its example.

    Raises:
        Exception: Whatever the model raises.
    """
    model = copy.deepcopy(structure.model).eval()  # without dropout, whose numbers have no units
    trace = UnitTrace(model)
    with torch.no_grad(), warnings.catch_warnings(), unfused():
        warnings.simplefilter("ignore")
        with trace:
            scores = call_model(model, copy_of(structure.example))
    trace.replay(scores)
    for factor in trace.get(scores):
        trace.ledger.fix(factor.ids, OUTPUTS)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            _share_hidden_size(trace, f"{name}." if name else "", module)
    return trace


def _share_hidden_size(trace: UnitTrace, prefix: str, module: nn.RNNBase) -> None:
    """Make the hidden units of all layers and directions the same, since a recurrent module has one hidden size."""
    for kind in ("weight_hh", "weight_hr"):
        names = [n for n, _ in module.named_parameters(recurse=False) if n.startswith(kind)]
        for other in names[1:]:
            trace.ledger.same(trace.ids[f"{prefix}{names[0]}", 0], trace.ids[f"{prefix}{other}", 0])
