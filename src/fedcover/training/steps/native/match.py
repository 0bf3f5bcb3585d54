"""Recognition of models that are chains: by watching a forward pass, and by comparing steps with autograd."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.params import Params
from fedcover.seeding import ambient, generator
from fedcover.structure.dispatch import Watch
from fedcover.structure.dropout import DropoutCall, Stream
from fedcover.training.steps.agreement import RECIPE, STEP, agree, defined_steps
from fedcover.training.steps.native.build import library
from fedcover.training.steps.native.chain import DROPOUT, LINEAR, RELU, Chain, ChainState, Op
from fedcover.training.steps.traced import dropout_calls

aten = torch.ops.aten

MOST_OPS = 64
"""The largest number of layers that the library takes."""
ROWS = 3
"""The number of examples in the batch of the watched pass."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Places = Mapping[str, tuple[int, int]]
"""For each parameter, the first of its entries in a flat buffer, and their number."""


class Matcher:
    """A finder of the chain that is equivalent to a model, with a cache by input shape and number of rows.

    Args:
        model: The model, with keyed dropout.
        stream: The stream of the model's dropout.
        loss: The loss; chains support only ``F.cross_entropy``.
    """

    def __init__(self, model: nn.Module, stream: Stream, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._model, self._stream, self._loss = model, stream, loss
        self._chains: dict[torch.Size, Chain | None] = {}
        self._agreed: dict[tuple[torch.Size, int], bool] = {}

    def find(self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int, places: Places) -> Chain | None:
        """Return the chain that can take these steps; None if the model is not a chain or there is no library."""
        if not (labels.dtype == orders.dtype == torch.int64 and labels.ndim == 1 and inputs.dtype == torch.float32):
            return None
        if not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (inputs, labels, orders)):
            return None
        shape, count = inputs.shape[1:], orders.shape[1]
        if shape not in self._chains:
            self._chains[shape] = self._find(inputs, places)
        chain = self._chains[shape]
        sizes = {min(batch_size, count), count % batch_size or min(batch_size, count)}
        return chain if chain and all(self._agrees(chain, shape, rows, places) for rows in sizes) else None

    def _find(self, inputs: Tensor, places: Places) -> Chain | None:
        if self._loss is not F.cross_entropy or not _plain(self._model, inputs):
            return None
        native = library()
        if native is None:
            return None
        try:
            with ambient(0, "find chain"), torch.no_grad():
                batch = inputs[:1].expand(ROWS, *inputs.shape[1:]).contiguous()
                ops = _find_ops(self._model, self._stream, batch, places)
        except MemoryError:
            raise
        except Exception:  # such as control flow that depends on data
            return None
        finally:
            self._stream.prepared = None
        return Chain(native, ops) if ops and len(ops) <= MOST_OPS else None

    def _agrees(self, chain: Chain, shape: torch.Size, rows: int, places: Places) -> bool:
        """Return whether a chain's steps on batches of this many rows agree with the definition."""
        if (shape, rows) not in self._agreed:
            before = self._stream.key, self._stream.step
            try:
                self._agreed[shape, rows] = _agree(chain, self._model, self._stream, shape, rows, places)
            finally:
                self._stream.key, self._stream.step = before
        return self._agreed[shape, rows]


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


def _find_ops(model: nn.Module, stream: Stream, x: Tensor, places: Places) -> list[Op] | None:
    """Return the layers of a model, from first to last; None if it does anything else."""
    calls = dropout_calls(model, stream, x)
    stream.prepared = {call: torch.ones(call.shape, dtype=call.dtype) for call in calls}
    stream.step = 0
    dropped = {id(scale): call for call, scale in stream.prepared.items()}
    parameters = {id(p): name for name, p in model.named_parameters()}
    transposed: dict[int, str] = {}
    ops: list[Op] = []
    at = x.clone()  # a model may modify its input
    with _Operations() as watch:
        result = model(at)
    for func, args, kwargs, out in watch.calls:
        if func is aten.t.default and id(args[0]) in parameters:
            transposed[id(out)] = parameters.pop(id(args[0]))  # removed, so that no parameter is used twice
            continue
        others = [argument for argument in args if argument is not at]
        if kwargs or len(others) == len(args) or not isinstance(out, Tensor):
            return None
        if out.dtype != torch.float32 or out.ndim == 0 or len(out) != ROWS:
            return None
        inputs, outputs = at[0].numel(), out[0].numel()
        if func in (aten.view.default, aten._unsafe_view.default):
            pass
        elif func in (aten.relu.default, aten.relu_.default):
            ops.append(Op(RELU, inputs, outputs))
        elif func is aten.mul.Tensor and others and id(others[0]) in dropped:
            ops.append(_dropout(dropped[id(others[0])], inputs))
        elif func is aten.mm.default and args[0] is at and id(args[1]) in transposed:
            ops.append(Op(LINEAR, inputs, outputs, places[transposed.pop(id(args[1]))][0]))
        elif func is aten.addmm.default and args[1] is at and id(args[2]) in transposed:
            weight, bias = transposed.pop(id(args[2])), parameters.pop(id(args[0]), None)
            if bias is None or places[bias][1] != outputs:
                return None
            ops.append(Op(LINEAR, inputs, outputs, places[weight][0], places[bias][0]))
        else:
            return None
        at = out
    complete = result is at and at.ndim == 2 and not parameters and not transposed
    return ops if complete else None


def _dropout(call: DropoutCall, features: int) -> Op:
    return Op(DROPOUT, features, features, layer=call.layer, least=int(call.p * 2**32), scale=1 / (1 - call.p))


def _agree(chain: Chain, model: nn.Module, stream: Stream, shape: torch.Size, rows: int, places: Places) -> bool:
    """Return whether two steps of a chain agree with the definition, on random values.

    The values are the same in every process, so that all processes accept the same models.
    """

    def values(seed: int) -> tuple[Params, Tensor, Tensor]:
        rng = generator(seed, "agree")
        theta = {n: torch.randn(p.shape, generator=rng) / p[0].numel() ** 0.5 for n, p in model.named_parameters()}
        x = torch.randn(2 * rows, *shape, generator=rng)
        return theta, x, torch.randint(chain.classes, (2 * rows,), generator=rng)

    def fast(seed: int) -> list[Tensor] | None:
        theta, x, y = values(seed)
        flat = torch.zeros(max(at + size for at, size in places.values()))
        for name, tensor in theta.items():
            flat[places[name][0] :][: tensor.numel()] = tensor.flatten()
        state = ChainState(flat, torch.zeros_like(flat), None, RECIPE.lr, RECIPE.momentum, seed, STEP)
        losses = chain.epochs(state, x, y, torch.arange(2 * rows).unsqueeze(0), rows)
        if losses is None:
            return None
        parts = [(places[name], tensor) for name, tensor in theta.items()]
        buffers = (state.theta, state.velocity)
        return [losses, *(buffer[at : at + size].view_as(t) for (at, size), t in parts for buffer in buffers)]

    def defined(seed: int) -> Sequence[Tensor]:
        theta, x, y = values(seed)
        stream.key = seed
        batches = [(x[:rows], y[:rows]), (x[rows:], y[rows:])]
        return defined_steps(model, stream, F.cross_entropy, theta, batches)

    return agree(fast, defined)
