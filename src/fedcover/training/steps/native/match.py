"""Recognition of models that are chains: by tracing a forward pass, and by comparing steps with autograd."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from fedcover.seeding import ambient, generator
from fedcover.structure.dropout import DropoutCall, Stream
from fedcover.training.steps.native.build import library
from fedcover.training.steps.native.chain import DROPOUT, LINEAR, RELU, Chain, ChainState, Op
from fedcover.training.steps.traced import dropout_calls

aten = torch.ops.aten

MOST_OPS = 64
"""The largest number of layers that the library takes."""
ROWS = 3
"""The number of examples in the traced batch."""
CLOSE = 1e-4
"""The largest accepted difference from autograd, relative to a tensor's largest entry."""
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
            with ambient(0, "find chain"), torch.enable_grad():
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
        """Return whether a chain's steps on batches of this many rows agree with autograd's."""
        if (shape, rows) not in self._agreed:
            before = self._stream.key, self._stream.step
            try:
                with ambient(0, "agree"), torch.enable_grad():
                    # Two tries, since rounding may move values next to the kink of a ReLU to either side.
                    tries = (_agree(chain, self._model, self._stream, shape, rows, places, seed) for seed in range(2))
                    self._agreed[shape, rows] = any(tries)
            except MemoryError:
                raise
            except Exception:
                self._agreed[shape, rows] = False
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


def _find_ops(model: nn.Module, stream: Stream, x: Tensor, places: Places) -> list[Op] | None:
    """Return the layers of a model, from first to last; None if it does anything else."""
    names = [name for name, _ in model.named_parameters()]
    calls = dropout_calls(model, stream, x)

    def forward(x: Tensor, *tensors: Tensor) -> Any:
        stream.prepared = dict(zip(calls, tensors[len(names) :], strict=True))
        stream.step = 0
        return functional_call(model, dict(zip(names, tensors, strict=False)), (x,))

    values = [p.detach().clone() for p in model.parameters()]
    scales = [torch.ones(call.shape, dtype=call.dtype) for call in calls]
    traced = make_fx(forward, tracing_mode="fake", _allow_non_fake_inputs=True)(x, *values, *scales)
    at, *rest = (node for node in traced.graph.nodes if node.op == "placeholder")
    parameters, dropped = dict(zip(rest, names, strict=False)), dict(zip(rest[len(names) :], calls, strict=True))
    transposed: dict[Any, str] = {}
    ops: list[Op] = []
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is aten.t.default and node.args[0] in parameters:
            transposed[node] = parameters.pop(node.args[0])  # removed, so that no parameter is used twice
            continue
        if node.kwargs or node.op != "call_function" or at not in node.args:
            return None
        before, after = at.meta["val"], node.meta["val"]
        inputs, outputs = before[0].numel(), after[0].numel()
        others = [argument for argument in node.args if argument is not at]
        if after.dtype != torch.float32 or len(after) != ROWS:
            return None
        if node.target in (aten.view.default, aten._unsafe_view.default):
            pass
        elif node.target in (aten.relu.default, aten.relu_.default):
            ops.append(Op(RELU, inputs, outputs))
        elif node.target is aten.mul.Tensor and others and others[0] in dropped:
            ops.append(_dropout(dropped[others[0]], inputs))
        elif node.target is aten.mm.default and node.args[0] is at and node.args[1] in transposed:
            ops.append(Op(LINEAR, inputs, outputs, places[transposed.pop(node.args[1])][0]))
        elif node.target is aten.addmm.default and node.args[1] is at and node.args[2] in transposed:
            weight, bias = transposed.pop(node.args[2]), parameters.pop(node.args[0], None)
            if bias is None or places[bias][1] != outputs:
                return None
            ops.append(Op(LINEAR, inputs, outputs, places[weight][0], places[bias][0]))
        else:
            return None
        at = node
    (result,) = next(node for node in traced.graph.nodes if node.op == "output").args
    complete = result is at and at.meta["val"].ndim == 2 and not parameters and not transposed
    return ops if complete else None


def _dropout(call: DropoutCall, features: int) -> Op:
    return Op(DROPOUT, features, features, layer=call.layer, least=int(call.p * 2**32), scale=1 / (1 - call.p))


def _agree(
    chain: Chain, model: nn.Module, stream: Stream, shape: torch.Size, rows: int, places: Places, seed: int
) -> bool:
    """Return whether two steps of a chain agree with those of autograd, on random values.

    The values are the same in every process, so that all processes accept the same models.
    """
    rng = generator(seed, "agree")
    theta = torch.zeros(max(at + size for at, size in places.values()))
    views = {name: theta[places[name][0] :][: p.numel()].view(p.shape) for name, p in model.named_parameters()}
    for view in views.values():
        view.copy_(torch.randn(view.shape, generator=rng) / view[0].numel() ** 0.5)
    x = torch.randn(2 * rows, *shape, generator=rng)
    y = torch.randint(chain.classes, (2 * rows,), generator=rng)
    state = ChainState(theta.clone(), torch.zeros_like(theta), None, lr=0.1, momentum=0.5, key=seed, step=7)
    losses = chain.epochs(state, x, y, torch.arange(2 * rows).unsqueeze(0), rows)
    if losses is None:
        return False
    expected, velocity = [], torch.zeros_like(theta)
    stream.key = seed
    for number in range(2):
        stream.step = state.step + number
        leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        batch = slice(number * rows, (number + 1) * rows)
        loss = F.cross_entropy(functional_call(model, leaves, (x[batch],)), y[batch])
        grads = torch.autograd.grad(loss, list(leaves.values()))
        velocity.mul_(state.momentum)
        for name, grad in zip(leaves, grads, strict=True):
            velocity[places[name][0] :][: grad.numel()].add_(grad.flatten())
        theta.sub_(velocity, alpha=state.lr)
        expected.append(loss.detach())
    pairs = [(losses, torch.stack(expected))]
    for at, size in places.values():
        pairs += [(state.velocity[at : at + size], velocity[at : at + size])]
        pairs += [(state.theta[at : at + size], theta[at : at + size])]
    return all(bool((a - b).abs().max() <= CLOSE * b.abs().max()) for a, b in pairs)
