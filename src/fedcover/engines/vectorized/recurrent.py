"""Recurrent layers of many clients: ``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells as products of stacks.

torch has no rules for batches of these layers, so clients would run one by one. Here a time step is one product for all
clients and one pass over their gates, and the gradient of the recurrent weights is one product over all time steps.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedcover.engines.vectorized.convolutions import has_own_forward
from fedcover.engines.vectorized.over_stacks import over_stacks
from fedcover.engines.vectorized.recurrent_cells import CELLS, After, Before, Gradients, RecurrentCell, wide_type

Layer = nn.LSTM | nn.GRU | nn.RNN
SingleStep = nn.LSTMCell | nn.GRUCell | nn.RNNCell
LAYERS, SINGLE_STEPS = (nn.LSTM, nn.GRU, nn.RNN), (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


@over_stacks
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None, cell: RecurrentCell
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the hidden states, the cell states, and what the gradients read.

    Args:
        x: The products of the inputs, (n, time, b, gates H).
        weight: The recurrent weights, (n, gates H, H).
        bias: What is added to their products, (n, gates H), or None.
        h: The hidden states before the first time step, (n, b, H). They are the first of the result.
        c: The cell states of an LSTM, or None.
        cell: The kind of layer.
    """
    x, units, by_units = x.contiguous(), weight.shape[2], weight.transpose(1, 2)
    n, time, batch, _ = x.shape
    hs = x.new_empty(time + 1, n, batch, units)
    cs = hs.new_empty(time + 1 if c is not None else 0, n, batch, units, dtype=wide_type(x.dtype))
    saved = x.new_empty(time, n, batch, cell.saved * units)
    hs[0] = h
    if c is not None:
        cs[0] = c
    for t in range(time):
        product = hs[t] @ by_units if bias is None else torch.baddbmm(bias.unsqueeze(1), hs[t], by_units)
        cell.step(Before(x[:, t], product, hs[t], _at(cs, t)), After(hs[t + 1], _at(cs, t + 1), saved[t]))
    return hs.transpose(0, 1), cs.transpose(0, 1), saved.transpose(0, 1)


@over_stacks
def _gradients(
    dh: Tensor | None, dc: Tensor | None, hs: Tensor, cs: Tensor, saved: Tensor, weight: Tensor, cell: RecurrentCell
) -> tuple[Tensor, ...]:
    """Return the gradients of all tensors that ``_forward`` takes, in their order.

    Args:
        dh: The gradient of the hidden states, or None.
        dc: That of the cell states, of which only the last are used, or None.
        hs, cs, saved: The results of ``_forward``.
        weight: The recurrent weights.
        cell: The kind of layer.
    """
    hs, cs, saved = (stack.transpose(0, 1).contiguous() for stack in (hs, cs, saved))
    time, n, batch, units = hs[1:].shape
    dh = torch.zeros_like(hs) if dh is None else dh.transpose(0, 1).contiguous()
    of_state = hs.new_zeros(hs[0].shape, dtype=wide_type(hs.dtype))
    if dc is not None:
        of_state.copy_(dc[:, -1])
    d_x = hs.new_empty(time, n, batch, cell.gates * units)
    d_product = torch.empty_like(d_x) if cell.gates_product else d_x
    through = torch.zeros_like(hs[0])
    for t in reversed(range(time)):
        before, after = Before(d_x[t], d_x[t], hs[t], _at(cs, t)), After(hs[t + 1], _at(cs, t + 1), saved[t])
        direct = cell.gradients(before, after, Gradients(dh[t + 1], through, of_state, d_x[t], d_product[t]))
        through = d_product[t] @ weight if direct is None else torch.baddbmm(direct, d_product[t], weight)
    rows, states = (stack.transpose(0, 1).flatten(1, 2) for stack in (d_product, hs[:-1]))
    return d_x.transpose(0, 1), rows.transpose(1, 2) @ states, rows.sum(1), through, of_state


class _Recurrence(torch.autograd.Function):
    """All time steps of one layer in one direction: the hidden and the cell states, with their gradients."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, h: Tensor, c: Tensor | None, cell: RecurrentCell
    ) -> Any:
        return _forward(x, weight, bias, h, c, cell)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, weight, bias, _, c, ctx.cell = inputs
        ctx.biased, ctx.with_state = bias is not None, c is not None
        ctx.save_for_backward(*output, weight)
        ctx.mark_non_differentiable(output[2], *([] if ctx.with_state else [output[1]]))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, dc: Tensor | None, _: Any) -> Any:
        with torch.no_grad():  # second derivatives are not needed
            x, weight, bias, h, c = _gradients(dh, dc, *ctx.saved_tensors, ctx.cell)
        return x, weight, bias if ctx.biased else None, h, c if ctx.with_state else None, None


def use_stacked_recurrence(model: nn.Module) -> bool:
    """Let the recurrent layers of a scratch model compute stacks, in place; return whether there are any.

    Layers with dropout between them, projections or hooks stay as they are.
    """
    layers = [layer for layer in model.modules() if _is_layer(layer) or _is_single_step(layer)]
    for layer in layers:
        layer.forward = MethodType(_run if _is_layer(layer) else _run_single_step, layer)  # type: ignore[method-assign]
    return bool(layers)


def _is_layer(layer: nn.Module) -> TypeGuard[Layer]:
    if not isinstance(layer, Layer) or type(layer) not in LAYERS or has_own_forward(layer):
        return False
    return layer.proj_size == 0 and (layer.dropout == 0 or layer.num_layers == 1)


def _is_single_step(layer: nn.Module) -> TypeGuard[SingleStep]:
    return type(layer) in SINGLE_STEPS and not has_own_forward(layer)


def _run_single_step(layer: SingleStep, input: Tensor, hx: Any = None) -> Any:
    """Return what the forward pass of a cell returns: a sequence of one time step."""
    has_state = isinstance(layer, nn.LSTMCell)
    mode = f"RNN_{layer.nonlinearity.upper()}" if isinstance(layer, nn.RNNCell) else type(layer).__name__[:-4]
    x = input if input.ndim == 2 else input.unsqueeze(0)
    if hx is None:
        firsts = [x.new_zeros(len(x), layer.hidden_size)] * 2
    else:
        firsts = [state.reshape(len(x), -1) for state in (hx if has_state else [hx])]
    hs, cs = _one_direction(layer, "", x.unsqueeze(0), firsts[0], firsts[1] if has_state else None, CELLS[mode])
    lasts = [states[-1] if input.ndim == 2 else states[-1, 0] for states in ((hs, cs) if has_state else (hs,))]
    return tuple(lasts) if has_state else lasts[0]


def _run(layer: Layer, input: Any, hx: Any = None) -> Any:
    """Return what the layer's own ``forward`` returns."""
    if not isinstance(input, Tensor):  # a packed sequence
        own: Any = type(layer).forward
        return own(layer, input, hx)
    batched, has_state = input.ndim == 3, layer.mode == "LSTM"
    x = input.unsqueeze(1) if not batched else input.transpose(0, 1) if layer.batch_first else input
    firsts = _first_states(layer, x, hx, batched)
    cell, last_h, last_c = CELLS[layer.mode], list[Tensor](), list[Tensor]()
    for number in range(layer.num_layers):
        outputs = []
        for suffix in ("", "_reverse")[: 1 + layer.bidirectional]:
            h, c = (states[len(last_h)] for states in firsts) if has_state else (firsts[0][len(last_h)], None)
            hs, cs = _one_direction(layer, f"_l{number}{suffix}", x.flip(0) if suffix else x, h, c, cell)
            outputs.append(hs[1:].flip(0) if suffix else hs[1:])
            last_h.append(hs[-1])
            last_c.append(cs[-1] if has_state else cs)
        x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    lasts = [torch.stack(last_h), *([torch.stack(last_c)] if has_state else [])]
    if not batched:
        x, lasts = x.squeeze(1), [states.squeeze(1) for states in lasts]
    elif layer.batch_first:
        x = x.transpose(0, 1)
    return x, tuple(lasts) if has_state else lasts[0]


def _first_states(layer: Layer, x: Tensor, hx: Any, batched: bool) -> Sequence[Tensor]:
    """Return the states before the first time step, (layers, b, H): the hidden ones, and the cells of an LSTM."""
    if hx is None:
        rows = layer.num_layers * (1 + layer.bidirectional)
        return [x.new_zeros(rows, x.shape[1], layer.hidden_size)] * 2
    states = list(hx) if layer.mode == "LSTM" else [hx]
    return states if batched else [state.unsqueeze(1) for state in states]


def _one_direction(
    layer: Layer | SingleStep, suffix: str, x: Tensor, h: Tensor, c: Tensor | None, cell: RecurrentCell
) -> tuple[Tensor, Tensor]:
    """Return the hidden and the cell states of one layer in one direction, beginning with the first ones."""
    weights = (getattr(layer, f"{kind}{suffix}") for kind in ("weight_ih", "weight_hh"))
    biases = (getattr(layer, f"{kind}{suffix}") if layer.bias else None for kind in ("bias_ih", "bias_hh"))
    (outer, inner), (bias, inner_bias) = weights, biases
    if bias is not None and not cell.gates_product:
        bias, inner_bias = bias + inner_bias, None
    products = F.linear(x, outer, bias)
    arguments = (None if one is None else one.to(products.dtype) for one in (inner, inner_bias, h))
    state = None if c is None else c.to(wide_type(products.dtype))
    hs, cs, _ = _Recurrence.apply(products, *arguments, state, cell)  # type: ignore[no-untyped-call]
    return hs, cs


def _at(states: Tensor, t: int) -> Tensor:
    """Return the cell states of a time; layers without any have an empty tensor."""
    return states[t] if len(states) else states
