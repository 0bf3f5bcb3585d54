"""The choice of models that the library trains: chains whose steps agree with autograd."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.params import Params
from fedcover.structure.dropout import Stream
from fedcover.training.recipes import LocalSGD
from fedcover.training.steps.agreement import RECIPE, STEP, agree, defined_steps
from fedcover.training.steps.chains import find_layers, random_values
from fedcover.training.steps.native.build import library
from fedcover.training.steps.native.chain import Chain, ChainState
from fedcover.training.steps.native.layers import Places, ops_of
from fedcover.training.steps.rule import Rule, rule_of


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
        self._agreed: dict[tuple[torch.Size, int, LocalSGD], bool] = {}

    def find(
        self, inputs: Tensor, labels: Tensor, orders: Tensor, batch_size: int, places: Places, rule: Rule
    ) -> Chain | None:
        """Return the chain that can take these steps; None if the model is not a chain or there is no library.

        Args:
            inputs: The inputs of all examples.
            labels: The labels of all examples.
            orders: For each epoch, the indices of the client's examples in their order.
            batch_size: The number of examples per step.
            places: Where the parameters are in a flat buffer.
            rule: The rule of the steps.
        """
        if not (labels.dtype == orders.dtype == torch.int64 and labels.ndim == 1 and inputs.dtype == torch.float32):
            return None
        if not all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in (inputs, labels, orders)):
            return None
        shape, count = inputs.shape[1:], orders.shape[1]
        if shape not in self._chains:
            self._chains[shape] = self._find(inputs, places)
        chain = self._chains[shape]
        sizes = {min(batch_size, count), count % batch_size or min(batch_size, count)}
        if chain is None or not all(self._agrees(chain, shape, rows, places, _recipe_like(rule)) for rows in sizes):
            return None
        return chain

    def _find(self, inputs: Tensor, places: Places) -> Chain | None:
        native = library() if self._loss is F.cross_entropy else None
        if native is None:
            return None
        layers = find_layers(self._model, self._stream, inputs)
        ops = ops_of(layers, places) if layers else None
        if ops is None:
            return None
        return Chain(native, ops)

    def _agrees(self, chain: Chain, shape: torch.Size, rows: int, places: Places, recipe: LocalSGD) -> bool:
        """Return whether a chain's steps on batches of this many rows agree with the definition."""
        key = shape, rows, recipe
        if key not in self._agreed:
            before = self._stream.key, self._stream.step
            try:
                self._agreed[key] = _agree(chain, self._model, self._stream, shape, rows, places, recipe)
            finally:
                self._stream.key, self._stream.step = before
        return self._agreed[key]


def _agree(
    chain: Chain, model: nn.Module, stream: Stream, shape: torch.Size, rows: int, places: Places, recipe: LocalSGD
) -> bool:
    """Return whether two steps of a chain agree with the definition, on random values."""

    def values(seed: int) -> tuple[Params, Tensor, Tensor]:
        return random_values(model, shape, 2 * rows, chain.classes, seed)

    def flat(tensors: Params) -> Tensor:
        buffer = torch.zeros(max(at + size for at, size in places.values()))
        for name, tensor in tensors.items():
            buffer[places[name][0] :][: tensor.numel()] = tensor.flatten()
        return buffer

    def fast(seed: int) -> list[Tensor] | None:
        theta, x, y = values(seed)
        rule = rule_of(recipe, theta, _shifts(theta, recipe))
        assert rule is not None
        anchor, shift = (flat(tensors) if tensors else None for tensors in (rule.anchors, rule.shifts))
        whole = flat(theta)
        state = ChainState(whole, torch.zeros_like(whole), None, anchor, shift, rule, seed, STEP)
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
        return defined_steps(model, stream, F.cross_entropy, theta, batches, recipe, _shifts(theta, recipe))

    return agree(fast, defined)


def _recipe_like(rule: Rule) -> LocalSGD:
    """Return a recipe for the comparison that uses what a rule uses."""
    clip = 0.5 if rule.clip else None
    decay, proximal = (0.3, 0.0 if clip else 0.7) if rule.is_corrected else (0.0, 0.0)
    return replace(RECIPE, weight_decay=decay, proximal=proximal, clip=clip, nesterov=rule.nesterov)


def _shifts(theta: Params, recipe: LocalSGD) -> Params:
    """Return shifts for the comparison, if there is a proximal term: other values than those of the parameters."""
    return {name: tensor.flip(0) for name, tensor in theta.items()} if recipe.proximal else {}
