"""The axes of each kind of layer along which its units lie, and the attributes that hold its sizes."""

from typing import Any

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_depthwise(layer: nn.Module) -> bool:
    """Return whether a convolution has one input channel for each output channel."""
    return isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels > 1


def axes_of(layer: nn.Module, out: bool) -> dict[str, int] | None:
    """Return the axis of each tensor of a layer along which its units lie; None if the layer cannot be cut.

    Args:
        layer: Layer of any kind.
        out: True for the output units, False for the input units.
    """
    if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        if is_depthwise(layer):
            return {"weight": 0, "bias": 0}
        if getattr(layer, "groups", 1) != 1:
            return None
        return {"weight": 0, "bias": 0} if out else {"weight": 1}
    if isinstance(layer, TRANSPOSED) and layer.groups == 1:
        return {"weight": 1, "bias": 0} if out else {"weight": 0}
    if isinstance(layer, nn.Embedding) and out:
        return {"weight": 1}
    if isinstance(layer, (*NORMS, nn.GroupNorm)) or (isinstance(layer, nn.LayerNorm) and len(_normal(layer)) == 1):
        return {"weight": 0, "bias": 0}
    if isinstance(layer, nn.PReLU):
        return {"weight": 0} if layer.num_parameters > 1 else {}
    return None


def _normal(layer: nn.LayerNorm) -> tuple[int, ...]:
    return tuple(layer.normalized_shape)


def channels_of_group(layer: nn.Module) -> int:
    """Return the number of channels that must stay together: those that a group norm normalises as one."""
    return layer.num_channels // layer.num_groups if isinstance(layer, nn.GroupNorm) else 1


def statistics_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a layer that have one entry for each of its units."""
    if not isinstance(layer, NORMS):
        return {}
    buffers = {name: layer._buffers.get(name) for name in ("running_mean", "running_var")}
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def resize(layer: nn.Module, whole: nn.Module) -> None:
    """Set the size attributes of a layer from the shapes of its tensors; ``whole`` is the layer it was cut from."""
    small: Any = layer
    shape = tuple(small.weight.shape)
    if isinstance(layer, nn.Linear):
        small.out_features, small.in_features = shape
    elif is_depthwise(whole):
        small.out_channels = small.in_channels = small.groups = shape[0]
    elif isinstance(layer, CONVOLUTIONS):
        small.out_channels, small.in_channels = shape[:2]
    elif isinstance(layer, TRANSPOSED):
        small.in_channels, small.out_channels = shape[:2]
    elif isinstance(layer, nn.Embedding):
        small.embedding_dim = shape[1]
    elif isinstance(layer, NORMS):
        small.num_features = shape[0]
    elif isinstance(layer, nn.GroupNorm):
        small.num_groups, small.num_channels = shape[0] // channels_of_group(whole), shape[0]
    elif isinstance(layer, nn.LayerNorm):
        small.normalized_shape = shape
    elif isinstance(layer, nn.PReLU):
        small.num_parameters = shape[0]
