"""The attributes that hold the sizes of each kind of layer."""

from typing import Any, cast

from torch import Tensor, nn

from fedcover.structure.attention import ExplicitAttention

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def is_depthwise(layer: nn.Module) -> bool:
    """Return whether a convolution has one input channel for each output channel."""
    return isinstance(layer, CONVOLUTIONS) and layer.groups == layer.in_channels == layer.out_channels > 1


def statistics_of(layer: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a layer that have one entry for each of its units."""
    if not isinstance(layer, NORMS):
        return {}
    buffers = {name: layer._buffers.get(name) for name in ("running_mean", "running_var")}
    return {name: buffer for name, buffer in buffers.items() if buffer is not None}


def resize(layer: nn.Module, whole: nn.Module) -> None:
    """Set the size attributes of a layer from the shapes of its tensors; ``whole`` is the layer it was cut from."""
    small: Any = layer
    if isinstance(layer, nn.MultiheadAttention):
        ExplicitAttention.cut_from(layer, cast(nn.MultiheadAttention, whole))
        return
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        _resize_recurrent(small)
        return
    if not isinstance(getattr(layer, "weight", None), Tensor):
        return
    shape = tuple(small.weight.shape)
    if is_transposed_linear(layer):
        small.nx, small.nf = shape
    elif isinstance(layer, nn.Linear):
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
        each = cast(nn.GroupNorm, whole).num_channels // cast(nn.GroupNorm, whole).num_groups
        small.num_groups, small.num_channels = shape[0] // each, shape[0]
    elif isinstance(layer, nn.LayerNorm):
        small.normalized_shape = shape
    elif isinstance(layer, nn.PReLU):
        small.num_parameters = shape[0]


def _resize_recurrent(small: Any) -> None:
    """Set the sizes of a recurrent layer, whose weights are blocks of one row for each hidden unit."""
    last = "_l0" if isinstance(small, nn.RNNBase) else ""
    incoming, recurrent = getattr(small, f"weight_ih{last}"), getattr(small, f"weight_hh{last}")
    gates = {"LSTM": 4, "GRU": 3}.get(getattr(small, "mode", type(small).__name__.removesuffix("Cell")), 1)
    small.input_size, small.hidden_size = incoming.shape[1], len(recurrent) // gates
    if getattr(small, "proj_size", 0):
        small.proj_size = recurrent.shape[1]
    if isinstance(small, nn.RNNBase):
        small._init_flat_weights()


def recurrent_weights(model: nn.Module) -> list[str]:
    """Return the names of the parameters of recurrent layers."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase | nn.RNNCellBase)]
    return [f"{name}.{own}" if name else own for name, layer in layers for own, _ in layer.named_parameters()]


def is_transposed_linear(layer: nn.Module) -> bool:
    """Return whether a layer is the ``Conv1D`` of transformers, a linear layer with a weight of inputs x outputs."""
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def resize_parent(parent: nn.Module, whole: nn.Module, name: str) -> None:
    """Set the attributes in which attention of transformers keeps sizes of its layers, where it cannot infer them.

    Args:
        parent: Module to change, in place.
        whole: The module that it was cut from.
        name: Name of the layer in it that was cut.
    """
    before, after = (_outputs(module.get_submodule(name)) for module in (whole, parent))
    size, heads = getattr(whole, "all_head_size", None), getattr(whole, "num_attention_heads", None)
    if before and size == before and isinstance(heads, int) and heads * after % before == 0:
        for attribute, value in (("all_head_size", after), ("num_attention_heads", heads * after // before)):
            setattr(parent, attribute, value)
    size = getattr(whole, "split_size", None)  # of queries, of keys and of values in the outputs of one layer
    if isinstance(size, int) and before > size and before % size == 0:
        vars(parent)["split_size"] = size * after // before


def _outputs(layer: nn.Module) -> int:
    """Return the number of outputs of a linear layer; 0 for any other."""
    if isinstance(layer, nn.Linear):
        return len(layer.weight)
    return cast(Tensor, layer.weight).shape[1] if is_transposed_linear(layer) else 0
