"""Recognition of models that are chains of simple layers, by watching a forward pass."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedcover.params import Params
from fedcover.seeding import ambient, generator
from fedcover.structure.dispatch import Watch
from fedcover.structure.dropout import DropoutCall, Stream
from fedcover.structure.model_key import HOOKS
from fedcover.training.steps.traced import dropout_calls

aten = torch.ops.aten

LINEAR, RELU, DROPOUT, CONV, MAX_POOL, MEAN_POOL = range(6)
ROWS = 3
"""The number of examples in the batch of the watched pass."""


class Geometry(NamedTuple):
    """The shapes of a layer of images."""

    channels: tuple[int, int]
    """The channels before and after the layer."""
    height: tuple[int, int]
    width: tuple[int, int]
    kernel: tuple[int, int] = (1, 1)
    """The height and width of the kernel of a convolution or pooling."""
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    @property
    def before(self) -> tuple[int, int, int]:
        """The shape of an image before the layer."""
        return self.channels[0], self.height[0], self.width[0]

    @property
    def after(self) -> tuple[int, int, int]:
        """The shape of an image after the layer."""
        return self.channels[1], self.height[1], self.width[1]


class Layer(NamedTuple):
    """A layer of a chain."""

    kind: int
    inputs: int
    outputs: int
    weight: str = ""
    """The name of the weights of a linear layer or a convolution."""
    bias: str = ""
    """The name of its bias; empty if it has none."""
    call: DropoutCall | None = None
    """The call of a dropout layer."""
    geometry: Geometry | None = None
    """The shapes of a layer of images; None if the chain has linear layers only."""


def find_layers(model: nn.Module, stream: Stream, inputs: Tensor) -> list[Layer] | None:
    """Return the layers of a chain, from first to last; None if a model or its inputs are anything else.

    Every parameter must be trained, used once, in float32 and on the CPU, and there must be no hooks. Control flow that
    depends on values is not noticed: compare steps with the definition.

    Args:
        model: The model, with keyed dropout, in training mode.
        stream: The stream of the model's dropout.
        inputs: At least one example, on the CPU.
    """
    if not _plain(model, inputs):
        return None
    try:
        with ambient(0, "find chain"), torch.no_grad():
            return _watch(model, stream, inputs[:1].expand(ROWS, *inputs.shape[1:]).contiguous())
    except MemoryError:
        raise
    except Exception:  # such as control flow that depends on data
        return None
    finally:
        stream.prepared = None


def random_values(
    model: nn.Module, shape: torch.Size, rows: int, classes: int, seed: int
) -> tuple[Params, Tensor, Tensor]:
    """Return random parameters, and inputs and labels, with which steps of a chain are compared with the definition.

    The values are the same in every process, so that all processes accept the same models.
    """
    rng = generator(seed, "agree")
    theta = {n: torch.randn(p.shape, generator=rng) / p[0].numel() ** 0.5 for n, p in model.named_parameters()}
    x = torch.randn(rows, *shape, generator=rng)
    return theta, x, torch.randint(classes, (rows,), generator=rng)


def _plain(model: nn.Module, inputs: Tensor) -> bool:
    """Return whether every parameter is trained, in float32 and on the CPU, and there are no hooks."""
    parameters = list(model.parameters())
    tensors = [inputs, *parameters]
    return (
        inputs.ndim > 1
        and len(inputs) > 0
        and all(p.requires_grad and type(p) is nn.Parameter and not p._backward_hooks for p in parameters)
        and all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and not any(getattr(module, hooks) for module in model.modules() for hooks in HOOKS)
    )


class _Operations(Watch):
    """The operations of a forward pass, in their order; references keep their tensors from being replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Record one operation."""
        self.calls.append((func, args, kwargs, out))


def _watch(model: nn.Module, stream: Stream, x: Tensor) -> list[Layer] | None:
    """Return the layers that a forward pass calls; None if it does anything else."""
    calls = dropout_calls(model, stream, x)
    stream.prepared = {call: torch.ones(call.shape, dtype=call.dtype) for call in calls}
    stream.step = 0
    reader = _Reader(model, x.clone(), stream.prepared)  # a model may modify its input
    with _Operations() as watch:
        result = model(reader.at)
    return reader.layers if all(reader.read(*call) for call in watch.calls) and reader.is_complete(result) else None


class _Reader:
    """A reader of operations, which collects the layers that they are.

    Args:
        model: The model.
        x: The input of the watched pass.
        prepared: The tensors that the pass multiplied by in place of dropout.
    """

    def __init__(self, model: nn.Module, x: Tensor, prepared: Mapping[DropoutCall, Tensor]) -> None:
        self.at = x
        """The output of the last layer."""
        self.layers: list[Layer] = []
        self._sizes = {name: p.numel() for name, p in model.named_parameters()}
        self._dropped = {id(scale): call for call, scale in prepared.items()}
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._transposed: dict[int, str] = {}

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """Return whether an operation is a known layer, and append that."""
        if func is aten.t.default and id(args[0]) in self._parameters:
            # Removed, so that no parameter is used twice.
            self._transposed[id(out)] = self._parameters.pop(id(args[0]))
            return True
        if func is aten.max_pool2d_with_indices.default:
            out = out[0]
        if kwargs or not any(argument is self.at for argument in args) or not isinstance(out, Tensor):
            return False
        if out.dtype != torch.float32 or out.ndim == 0 or len(out) != ROWS:
            return False
        if func not in (aten.view.default, aten._unsafe_view.default):
            layer = self._layer(func, args, out)
            if layer is None:
                return False
            self.layers.append(layer)
        self.at = out
        return True

    def is_complete(self, result: Any) -> bool:
        """Return whether all parameters are used, and the layers can be trained in their order.

        Layers of images must be before the first linear layer. They keep their shapes between them, and there must be
        a convolution among them. Chains of linear layers do not need the shapes of images.
        """
        if result is not self.at or self.at.ndim != 2 or self._parameters or self._transposed:
            return False
        kinds = [layer.kind for layer in self.layers]
        if not set(kinds) & {CONV, MAX_POOL, MEAN_POOL}:
            self.layers = [layer._replace(geometry=None) for layer in self.layers]
            return True
        if LINEAR not in kinds or CONV not in kinds:
            return False
        front, rest = self.layers[: kinds.index(LINEAR)], self.layers[kinds.index(LINEAR) :]
        return self._keep_shapes(front) and not {layer.kind for layer in rest} & {CONV, MAX_POOL, MEAN_POOL}

    def _keep_shapes(self, front: list[Layer]) -> bool:
        """Complete the shapes of elementwise layers on flattened images; return whether all shapes follow."""
        shape = front[0].geometry.before if front[0].geometry else ()
        for number, layer in enumerate(front):
            geometry = layer.geometry or _geometry(shape, shape)
            if geometry is None or geometry.before != shape or prod(shape) != layer.inputs:
                return False
            self.layers[number] = layer._replace(geometry=geometry)
            shape = geometry.after
        return prod(shape) == self.layers[len(front)].inputs

    def _layer(self, func: Any, args: tuple[Any, ...], out: Tensor) -> Layer | None:
        """Return the layer that an operation on the present output is."""
        inputs, outputs = self.at[0].numel(), out[0].numel()
        others = [argument for argument in args if argument is not self.at]
        if func in (aten.relu.default, aten.relu_.default):
            return Layer(RELU, inputs, outputs, geometry=_geometry(self.at.shape[1:], out.shape[1:]))
        if func is aten.mul.Tensor and others and id(others[0]) in self._dropped:
            return self._dropout(self._dropped[id(others[0])], out)
        if func is aten.mm.default and args[0] is self.at and id(args[1]) in self._transposed:
            return Layer(LINEAR, inputs, outputs, self._transposed.pop(id(args[1])))
        if func is aten.addmm.default and args[1] is self.at and id(args[2]) in self._transposed:
            weight, bias = self._transposed.pop(id(args[2])), self._parameters.pop(id(args[0]), None)
            if bias is None or self._sizes[bias] != outputs:
                return None
            return Layer(LINEAR, inputs, outputs, weight, bias)
        if args[0] is not self.at or self.at.ndim != 4:
            return None
        return self._convolution(args, out) if func is aten.convolution.default else self._pooling(func, args, out)

    def _dropout(self, call: DropoutCall, out: Tensor) -> Layer | None:
        if tuple(call.shape) != tuple(self.at.shape):
            return None
        features, geometry = out[0].numel(), _geometry(self.at.shape[1:], out.shape[1:])
        return Layer(DROPOUT, features, features, call=call, geometry=geometry)

    def _convolution(self, args: tuple[Any, ...], out: Tensor) -> Layer | None:
        _, weight, bias, stride, padding, dilation, transposed, _, groups = args
        name = self._parameters.pop(id(weight), None)
        if name is None or transposed or groups != 1 or set(dilation) != {1}:
            return None
        bias_name = "" if bias is None else self._parameters.pop(id(bias), None)
        if bias_name is None:
            return None
        geometry = _geometry(self.at.shape[1:], out.shape[1:], weight.shape[2:], stride, padding)
        return Layer(CONV, self.at[0].numel(), out[0].numel(), name, bias_name, geometry=geometry)

    def _pooling(self, func: Any, args: tuple[Any, ...], out: Tensor) -> Layer | None:
        inputs, outputs, shape = self.at[0].numel(), out[0].numel(), self.at.shape[1:]
        if func is aten.mean.dim:
            geometry = _geometry(shape, (shape[0], 1, 1), shape[1:])
            return Layer(MEAN_POOL, inputs, outputs, geometry=geometry) if {i % 4 for i in args[1]} == {2, 3} else None
        if func not in POOLINGS:
            return None
        kind, defaults = POOLINGS[func]
        kernel, stride, padding, *others = (*args[1:], *defaults[len(args) - 2 :])
        geometry = _geometry(shape, out.shape[1:], kernel, stride or kernel, padding)
        return Layer(kind, inputs, outputs, geometry=geometry) if others == defaults[2:] else None


POOLINGS: dict[Any, tuple[int, list[Any]]] = {
    aten.max_pool2d_with_indices.default: (MAX_POOL, [[], [0, 0], [1, 1], False]),
    aten.avg_pool2d.default: (MEAN_POOL, [[], [0, 0], False, True, None]),
}
"""Poolings, with the defaults of their arguments after the kernel: those after the padding must have these values."""


def _geometry(
    before: Sequence[int],
    after: Sequence[int],
    kernel: Sequence[int] = (1, 1),
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
) -> Geometry | None:
    """Return the geometry of a layer; None if its input or output is not an image."""
    if not len(before) == len(after) == 3:
        return None
    channels, height, width = zip(before, after, strict=True)
    sides = ((pair[0], pair[-1]) for pair in (kernel, stride, padding))
    return Geometry(channels, height, width, *sides)
