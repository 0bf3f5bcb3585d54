"""The layers of a chain in the form for which there are kernels on a GPU."""

from collections.abc import Sequence
from typing import NamedTuple

from fedcover.engines.vectorized.chain_stacks import Front, Linear
from fedcover.engines.vectorized.pooled_stacks import PooledConvolution
from fedcover.training.steps.chains import CONV, DROPOUT, LINEAR, MAX_POOL, RELU, Geometry, Layer

MOST_OUTPUTS = 64
"""The largest number of outputs of a convolution: one program has all of them."""
MOST_PIXELS = 512
"""The largest number of pixels that a pooling window reads: loads of all of them are unrolled."""


class ChainLayers(NamedTuple):
    """The layers of a chain."""

    linear: list[Linear]
    """The linear layers, from first to last."""
    front: Front | None
    """The layers before them."""


def chain_layers(layers: Sequence[Layer]) -> ChainLayers | None:
    """Return the layers of a chain; None if there are no kernels for them."""
    kinds = [layer.kind for layer in layers]
    first = kinds.index(LINEAR) if LINEAR in kinds else 0
    linear = _linear_layers(layers[first:])
    front = _front(layers[:first]) if first else None
    return None if not linear or (first and front is None) else ChainLayers(linear, front)


def _linear_layers(layers: Sequence[Layer]) -> list[Linear]:
    """Return the linear layers with what follows each; empty if other layers, or the same twice, are between them."""
    linear: list[Linear] = []
    for layer in layers:
        if layer.kind == LINEAR:
            linear.append(Linear(layer.weight, layer.bias, layer.inputs, layer.outputs))
        elif layer.kind == RELU and linear and not linear[-1].relu:
            linear[-1] = linear[-1]._replace(relu=True)
        elif layer.kind == DROPOUT and linear and not linear[-1].drop:
            linear[-1] = linear[-1]._replace(drop=layer.call)
        else:
            return []
    return [] if linear and (linear[-1].relu or linear[-1].drop) else linear


def _front(layers: Sequence[Layer]) -> Front | None:
    """Return pooled convolutions with the dropout behind them; None for other layers."""
    drop = layers[-1].call if layers[-1].kind == DROPOUT else None
    layers = layers[:-1] if drop else layers
    groups = [layers[start : start + 3] for start in range(0, len(layers), 3)]
    convolutions = [_pooled_convolution(group) for group in groups]
    plain = [convolution for convolution in convolutions if convolution is not None]
    return Front(plain, drop) if plain and len(plain) == len(groups) else None


def _pooled_convolution(layers: Sequence[Layer]) -> PooledConvolution | None:
    """Return a convolution with ReLU and pooling, in either order, which makes no difference; None for other layers."""
    by_kind = {layer.kind: layer for layer in layers}
    if len(layers) != 3 or layers[0].kind != CONV or set(by_kind) != {CONV, RELU, MAX_POOL}:
        return None
    shapes, pooling = by_kind[CONV].geometry, by_kind[MAX_POOL].geometry
    if shapes is None or pooling is None or not _halves(pooling):
        return None
    if shapes.stride != (1, 1) or shapes.padding != (0, 0) or shapes.channels[1] > MOST_OUTPUTS:
        return None
    size = shapes.height[0], shapes.width[0]
    convolution = PooledConvolution(layers[0].weight, layers[0].bias, shapes.channels, size, shapes.kernel)
    return convolution if convolution.pixels <= MOST_PIXELS else None


def _halves(pooling: Geometry) -> bool:
    return pooling.kernel == pooling.stride == (2, 2) and pooling.padding == (0, 0)
