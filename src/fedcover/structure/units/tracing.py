"""A forward pass on which every operation passes on the labels of units."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedcover.data.inputs import Inputs, copy_of
from fedcover.structure.calls import call_model, first_line
from fedcover.structure.dispatch import Watch, unfused
from fedcover.structure.trace import ModelStructure
from fedcover.structure.units import views  # noqa: F401  its rules are registered when it is imported
from fedcover.structure.units.labels import Factor, Ids, Ledger, Operand
from fedcover.structure.units.modes import Step, WithoutDropout, same_program, set_mode
from fedcover.structure.units.operations import ELEMENTWISE, FACTORIES, RULES, elementwise, factory, tensors_in, unknown
from fedcover.structure.units.reductions import spatial

OUTPUTS = "they are the model's outputs"
_SPATIAL = ("pool", "upsample", "reflection_pad", "replication_pad")


class CannotRunError(Exception):
    """The model itself fails; the message is the reason why its units are unknown."""


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
        self.modes: tuple[bool, ...] = (False,)
        """Whether the model is in training mode, in each of its modes that differ by more than dropout."""
        self._factors: dict[int, tuple[Tensor, tuple[Factor, ...]]] = {}
        self._modules: list[str] = ["the model"]
        self._tape: list[Step] = []
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

    def record(self, model: nn.Module, inputs: Inputs) -> tuple[list[Step], Tensor]:
        """Return the operations of a forward pass, and the scores."""
        start = len(self._tape)
        with self:
            try:
                scores = call_model(model, copy_of(inputs))
            except Exception as error:
                mode = "training" if model.training else "evaluation"
                raise CannotRunError(f"the model fails in {mode} mode: {first_line(error)}") from error
        return self._tape[start:], scores

    def replay(self, steps: Sequence[Step], scores: Tensor) -> None:
        """Pass on the labels through the operations on which the scores depend; the scores cannot be removed."""
        needed, tape = {id(scores)}, []
        for step in reversed(steps):
            _, func, args, out = step
            if func._schema.is_mutable or any(id(tensor) in needed for tensor in tensors_in(out)):
                needed |= {id(tensor) for tensor in tensors_in(list(args.values()))}
                tape.append(step)
        for module, func, args, out in reversed(tape):
            self._modules.append(module)
            try:
                self._pass_on(func, args, out)
            except Exception as error:  # what a rule has stated before it failed only makes units larger
                self._fix_all(func, args, out, error)
            self._modules.pop()
        for factor in self.get(scores):
            self.ledger.fix(factor.ids, OUTPUTS)

    def _fix_all(self, func: Any, args: dict[str, Any], out: Any, error: Exception) -> None:
        """State that units which meet in an operation cannot be removed, since its rule fails."""
        name = func._overloadpacket.__name__
        text = f"has the operation '{name}', whose rule in fedcover fails with '{first_line(error)}'"
        for tensor in tensors_in([*args.values(), out]):
            for factor in self.get(tensor):
                self.ledger.fix(factor.ids, self.at(text))

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

    Where the model runs other operations in training mode, its labels come from both modes.

    Raises:
        CannotRunError: If the model fails.
    """
    model = copy.deepcopy(structure.model)
    trace = UnitTrace(model)
    with torch.no_grad(), warnings.catch_warnings(), unfused():
        warnings.simplefilter("ignore")
        passes = [trace.record(set_mode(model, training=False), structure.example)]
        with WithoutDropout():  # its numbers have no units
            trained = trace.record(set_mode(model, training=True), structure.example)
    if not same_program(passes[0][0], trained[0], model):
        passes.append(trained)
        trace.modes = (False, True)
    for steps, scores in passes:
        trace.replay(steps, scores)
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
