"""``nn.MultiheadAttention`` in single operations: with any number of heads, and with dropout of one's own."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CannotCutError(Exception):
    """A layer cannot be cut in this way; the message is the reason."""


class ExplicitAttention(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` from which heads may be cut; each of the others keeps its width.

    torch derives the width of a head from the number of heads, so its own forward pass cannot have fewer heads.
    """

    @classmethod
    def replace(cls, layer: nn.MultiheadAttention) -> None:
        """Make a layer compute its outputs by single operations, in place."""
        if not can_be_explicit(layer):
            raise CannotCutError("it adds a row to keys and values (add_bias_kv or add_zero_attn)")
        layer.__class__ = cls
        layer._qkv_same_embed_dim = False  # torch's encoder layer then calls this forward pass, not its fused one

    @classmethod
    def cut_from(cls, layer: nn.MultiheadAttention, whole: nn.MultiheadAttention) -> None:
        """Turn a copy of ``whole``, whose parameters were cut, into an attention with fewer heads, in place."""
        cls.replace(layer)
        packed = layer.in_proj_weight
        rows = len(packed) // 3 if packed is not None else len(cast(Tensor, layer.q_proj_weight))
        if rows % whole.head_dim:
            raise CannotCutError("its heads cannot be narrower")
        layer.num_heads = rows // whole.head_dim
        layer.embed_dim = layer.out_proj.out_features = len(layer.out_proj.weight)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values and, if asked for, the weights of attention, as torch does."""
        single = query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, (weight, bias) in zip((query, key, value), self._projections(), strict=True)
        )
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5 + self._mask(q, k, attn_mask, key_padding_mask, is_causal)
        weights = scores.softmax(-1)
        drop = self._modules.get("keyed_dropout")
        mixed = (F.dropout(weights, self.dropout, self.training) if drop is None else drop(weights)) @ v
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        shown = (weights.mean(1) if average_attn_weights else weights) if need_weights else None
        if single:
            return out.squeeze(0), None if shown is None else shown.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), shown

    def _projections(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return weight and bias of the queries, keys and values."""
        weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return list(zip(weights, biases, strict=True))

    def _mask(
        self, q: Tensor, k: Tensor, attn_mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> Tensor | float:
        """Return what is added to the scores of attention."""
        added: Tensor | float = 0.0
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        if attn_mask is not None:
            if attn_mask.ndim == 3:
                if len(attn_mask) != len(q) * self.num_heads:
                    raise CannotCutError("its mask differs between heads")
                attn_mask = attn_mask.unflatten(0, (len(q), self.num_heads))
            added = added + _additive(attn_mask, q)
        if padding is not None:
            added = added + _additive(padding[:, None, None, :], q)
        return added


def can_be_explicit(layer: nn.MultiheadAttention) -> bool:
    """Return whether a layer can be replaced: not if it adds a row to keys and values."""
    return layer.bias_k is None and not layer.add_zero_attn


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    drop: Callable[[Tensor], Tensor],
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return what ``F.scaled_dot_product_attention`` does, with a function that drops weights of attention."""
    if key.shape[1] != query.shape[1] and query.ndim == 4:  # several heads of queries share one of keys and values
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        scores = scores + _additive(~attn_mask if attn_mask.dtype == torch.bool else attn_mask, scores)
    return drop(scores.softmax(-1)) @ value


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add: -inf where a bool mask is True."""
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf) if mask.dtype == torch.bool else mask
