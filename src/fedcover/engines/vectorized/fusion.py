"""Sequences of layers that are computed in one pass: a convolution's moments, its norm, an addition and a ReLU.

The model is traced to a graph of its layers, in which such sequences are replaced. A model that cannot be traced, or
whose graph does not compute the same, keeps its layers as they are.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fedcover.data.inputs import Inputs, copy_of
from fedcover.engines.vectorized.channels_last import ImageNorm, PatchConv2d, then
from fedcover.engines.vectorized.convolutions import has_own_forward
from fedcover.structure.calls import call_model
from fedcover.structure.dropout import silent_dropout
from fedcover.structure.exits import ExitModel

RELUS = {F.relu, torch.relu, F.relu_, torch.relu_, "relu", "relu_"}
ADDITIONS = {operator.add, torch.add, "add"}
CHANGING_ADDITIONS = {operator.iadd, "add_"}
"""Additions that change their first operand."""


class NormSequence(nn.Module):
    """A norm, with the convolution before it if there is one, and an addition and a ReLU behind it.

    The layers stay where they are in the model, so that its parameters keep their names.
    """

    def __init__(self, conv: PatchConv2d | None, norm: ImageNorm, relu: bool) -> None:
        super().__init__()
        self._layers = (conv, norm)  # a tuple is not a child
        self._relu = relu

    def forward(self, x: Tensor, added: Any = None) -> Tensor:
        """Return the result for a batch of images."""
        conv, norm = self._layers
        if conv is not None and conv.bias is None and not norm.groups and norm.batch is None:
            images, *moments = conv.product(x, moments=True)
            return norm.normalised(images, added, self._relu, *moments)
        images = x if conv is None else conv(x)
        if images.ndim != 4:  # a group norm of other inputs than images
            return then(norm(images), added, self._relu)
        return norm.normalised(images.permute(0, 2, 3, 1), added, self._relu)


class _LayerTracer(fx.Tracer):
    """A tracer that does not look into layers without children."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not list(m.children()) or super().is_leaf_module(m, module_qualified_name)


def trace_layers(model: nn.Module, example: Inputs) -> fx.GraphModule | None:
    """Return a graph of a model's layers; None if there is none that computes the same on an example."""
    containers = [module for module in model.modules() if list(module.children())]
    if any(map(has_own_forward, containers)):
        return None
    try:
        traced = fx.GraphModule(model, _LayerTracer().trace(model))
        if isinstance(model, ExitModel):
            _add_unused_layers(traced, model)
        names = {name for name, _ in model.named_parameters()}
        if names != {name for name, _ in traced.named_parameters()}:
            return None
        with torch.no_grad(), silent_dropout():  # otherwise each pass would drop other entries
            same = torch.equal(call_model(model, copy_of(example)), call_model(traced, copy_of(example)))
    except Exception:
        return None
    return traced if same else None  # its layers have the mode that they had: some may be in evaluation mode


def _add_unused_layers(traced: fx.GraphModule, model: nn.Module) -> None:
    """Add the layers that a traced model does not run, such as those behind its last exit, so that all names exist."""
    present = {name for name, _ in traced.named_parameters()}
    unused = (name.rpartition(".")[0] for name, _ in model.named_parameters() if name not in present)
    for path in dict.fromkeys(filter(None, unused)):
        traced.add_submodule(path, model.get_submodule(path))


def fuse_norms(traced: fx.GraphModule) -> int:
    """Replace the sequences around the norms of a traced model, in place; return how many were replaced."""
    modules, count = dict(traced.named_modules()), 0
    for node in list(traced.graph.nodes):
        norm = modules.get(node.target) if node.op == "call_module" else None
        if isinstance(norm, ImageNorm) and len(node.args) == 1 and not node.kwargs:
            count += _fuse(traced, modules, node, norm, f"norm_sequence_{count}")
    traced.graph.lint()
    traced.recompile()
    return count


def _fuse(traced: fx.GraphModule, modules: dict[str, nn.Module], node: Any, norm: ImageNorm, name: str) -> int:
    """Replace the sequence around the call of a norm by a new child of the traced model; return 1 or 0."""
    before, sequence, added = node.args[0], [node], None
    conv = modules.get(before.target) if before.op == "call_module" and len(before.users) == 1 else None
    if (user := _only_user(node)) is not None and (added := _other_operand(user, node)) is not None:
        sequence.append(user)
    user = _only_user(sequence[-1])
    relu = user is not None and _is_relu(user, modules)
    if relu:
        sequence.append(user)
    fused_conv = conv if isinstance(conv, PatchConv2d) and len(before.args) == 1 else None
    if fused_conv is None and len(sequence) == 1:
        return 0
    if any(_changes(other, modules) for other in _between(before, sequence[-1]) if other not in sequence):
        return 0  # the sequence is computed where its last layer was
    modules[name] = NormSequence(fused_conv, norm, relu)  # which later sequences may be added to
    traced.add_submodule(name, modules[name])
    source = before.args[0] if fused_conv is not None else before
    with traced.graph.inserting_before(sequence[-1]):
        new = traced.graph.call_module(name, (source,) if added is None else (source, added))
    sequence[-1].replace_all_uses_with(new)
    for old in [*reversed(sequence), *([before] if fused_conv is not None else [])]:
        traced.graph.erase_node(old)
    return 1


def _between(first: Any, last: Any) -> list[Any]:
    """Return the nodes of a graph between two of them."""
    nodes, node = [], first.next
    while node is not last:
        nodes.append(node)
        node = node.next
    return nodes


def _changes(node: Any, modules: dict[str, nn.Module]) -> bool:
    """Return whether a node may change its arguments in place."""
    if node.op == "call_module":
        layer = modules[node.target]
        trusted = type(layer).__module__.startswith(("torch.nn.", "fedcover."))
        return not trusted or bool(getattr(layer, "inplace", False))
    if any(value is True for value in node.args):  # as in F.relu(x, True)
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.op == "call_function" and name.startswith("i") and hasattr(operator, name)
    return in_place or name.endswith("_") or name == "__setitem__" or bool(node.kwargs.get("inplace"))


def _only_user(node: Any) -> Any | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _other_operand(user: Any, node: Any) -> Any | None:
    """Return what a node is added to; None if its user is not an addition that leaves the other operand as it is."""
    if len(user.args) != 2 or user.kwargs or not all(isinstance(value, fx.Node) for value in user.args):
        return None
    first, second = user.args
    if first is second or user.op not in ("call_function", "call_method"):
        return None
    if user.target in ADDITIONS:
        return second if first is node else first
    return second if user.target in CHANGING_ADDITIONS and first is node else None


def _is_relu(node: Any, modules: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":
        layer = modules[node.target]
        return type(layer) is nn.ReLU and not has_own_forward(layer)
    plain = len(node.args) == 1 and not (set(node.kwargs) - {"inplace"})
    return plain and node.op in ("call_function", "call_method") and node.target in RELUS
