"""The layers of a chain in the form that the library takes."""

from collections.abc import Mapping, Sequence
from math import prod

from fedcover.training.steps.chains import Layer
from fedcover.training.steps.native.chain import Op

MOST_OPS = 64
"""The largest number of layers that the library takes."""
MOST_KERNEL = 16
"""The largest side of a convolution's kernel that the library takes."""
MOST_WEIGHTS = 1 << 17
"""The largest number of weights of a convolution that the library takes: torch is faster with wider ones."""

Places = Mapping[str, tuple[int, int]]
"""For each parameter, the first of its entries in a flat buffer, and their number."""


def ops_of(layers: Sequence[Layer], places: Places) -> list[Op] | None:
    """Return layers in the form that the library takes; None if it does not take them.

    Args:
        layers: The layers of a chain.
        places: Where the parameters are in a flat buffer.
    """
    if not 0 < len(layers) <= MOST_OPS or not all(map(_is_taken, layers)):
        return None
    return [_op(layer, places) for layer in layers]


def _is_taken(layer: Layer) -> bool:
    """Return whether a layer is small enough."""
    if layer.geometry is None or not layer.weight:
        return True
    kernel = layer.geometry.kernel
    return max(kernel) <= MOST_KERNEL and prod(kernel) * prod(layer.geometry.channels) <= MOST_WEIGHTS


def _op(layer: Layer, places: Places) -> Op:
    op = Op(layer.kind, layer.inputs, layer.outputs, geometry=layer.geometry)
    if layer.call is not None:
        p = layer.call.p
        return op._replace(layer=layer.call.layer, least=int(p * 2**32), scale=1 / (1 - p))
    weight, bias = (places[name][0] if name else -1 for name in (layer.weight, layer.bias))
    return op._replace(weight=weight, bias=bias)
