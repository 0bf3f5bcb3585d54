"""What each kind of layer has along its units, and how it is told that there are fewer."""

from typing import Any

from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a convolution has one input channel for each output channel, and no others."""
    return isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels > 1


def axes_of(layer: nn.Module, out: bool) -> dict[str, int] | None:
    """Which axis of which of a layer's tensors its output (or input) units lie along; None if it cannot be cut."""
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
    """How many channels a layer needs to keep together: those that a group norm normalises as one."""
    return layer.num_channels // layer.num_groups if isinstance(layer, nn.GroupNorm) else 1


def statistics_of(layer: nn.Module) -> dict[str, Tensor]:
    """The buffers of a layer that have an entry for each of its units."""
    if not isinstance(layer, NORMS):
        return {}
    return {name: kept for name in ("running_mean", "running_var") if (kept := layer._buffers.get(name)) is not None}


def resize(layer: nn.Module, whole: nn.Module) -> None:
    """Set what a layer says about its sizes to what its tensors have; ``whole`` is the layer that it was cut from."""
    made: Any = layer
    shape = tuple(made.weight.shape)
    if isinstance(layer, nn.Linear):
        made.out_features, made.in_features = shape
    elif is_depthwise(whole):
        made.out_channels = made.in_channels = made.groups = shape[0]
    elif isinstance(layer, CONVOLUTIONS):
        made.out_channels, made.in_channels = shape[:2]
    elif isinstance(layer, TRANSPOSED):
        made.in_channels, made.out_channels = shape[:2]
    elif isinstance(layer, nn.Embedding):
        made.embedding_dim = shape[1]
    elif isinstance(layer, NORMS):
        made.num_features = shape[0]
    elif isinstance(layer, nn.GroupNorm):
        made.num_groups, made.num_channels = shape[0] // channels_of_group(whole), shape[0]
    elif isinstance(layer, nn.LayerNorm):
        made.normalized_shape = shape
    elif isinstance(layer, nn.PReLU):
        made.num_parameters = shape[0]
