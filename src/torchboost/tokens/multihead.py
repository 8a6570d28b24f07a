"""The attention of ``torch.nn``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.tokens.attention import Mask, attention, merged
from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows, Rows
from torchboost.tokens.scores import Scores

_HEADS = (BATCH, 0, TOKEN, 1)
_LENGTH_FIRST = (TOKEN, BATCH, 0)
_BIASES = (None, None, None)


def multi_head_attention_forward(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``torch.nn.functional.multi_head_attention_forward`` for each sequence of a padded batch.

    The masks must exclude the padding for every query that is computed. The weights of keys cannot be read.
    """
    tensors = (query, key, value)
    if add_zero_attn or any(one is not None for one in (bias_k, bias_v, static_k, static_v)):
        raise MissingRows("it adds keys")
    if any(one.dims != _LENGTH_FIRST if isinstance(one, Rows) else one.ndim != 3 for one in tensors):
        raise MissingRows("its tensors have other dimensions")
    if query.shape[-1] != embed_dim_to_check or embed_dim_to_check % num_heads or (is_causal and attn_mask is None):
        raise MissingRows("its arguments are of another kind")
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        weights = (in_proj_weight,) if query is key and key is value else _thirds(in_proj_weight)
    biases = (in_proj_bias,) if len(weights) == 1 else _BIASES if in_proj_bias is None else _thirds(in_proj_bias)
    queries, keys, values = [_heads(one, num_heads) for one in _projected(tensors, weights, biases)]
    layouts = [one.positions if isinstance(one, Rows) else None for one in tensors]
    hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if hint else _mask(attn_mask, key_padding_mask, layouts, num_heads)
    result = attention(
        F.scaled_dot_product_attention,
        queries,
        keys,
        values,
        mask,
        dropout_p if training else 0.0,
        hint,
        undefined=need_weights,
    )
    weights = _unread_weights(queries, keys, values, averaged=average_attn_weights) if need_weights else None
    if isinstance(result, Rows):
        rows = F.linear(result.rows.flatten(1), out_proj_weight, out_proj_bias)
        return result.like(rows, result.positions, _LENGTH_FIRST), weights
    return F.linear(result.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), weights


def _thirds(tensor: Tensor | None) -> tuple[Tensor, ...]:
    if tensor is None:
        raise MissingRows("its arguments are of another kind")
    return tensor.chunk(3)


def _projected(tensors: tuple[Tensor, ...], weights: Any, biases: Any) -> list[Tensor]:
    """Return queries, keys and values: rows of shape (rows, width), or whole ones of shape (length, batch, width)."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x.rows if isinstance(x, Rows) else x, weight, bias)

    if len(weights) == 1:
        parts: Any = linear(tensors[0], weights[0], biases[0]).chunk(3, -1)
    else:
        parts = [linear(*one) for one in zip(tensors, weights, biases, strict=True)]
    return [x.of(part) if isinstance(x, Rows) else part for x, part in zip(tensors, parts, strict=True)]


def _heads(x: Tensor, count: int) -> Tensor:
    """Return the tensor in the shape (batch, heads, length, width)."""
    if isinstance(x, Rows):
        return x.like(x.rows.unflatten(-1, (count, -1)), x.positions, _HEADS)
    return x.unflatten(-1, (count, -1)).permute(1, 2, 0, 3)


def _mask(mask: Tensor | None, padding: Tensor | None, layouts: list[Layout | None], heads: int) -> Tensor | None:
    """Return both masks as the single mask that :func:`attention` takes."""
    if any(isinstance(one, Rows) or (one is not None and one.requires_grad) for one in (mask, padding)):
        raise MissingRows("its mask is of another kind")
    layout = next(one for one in layouts if one is not None)
    masks: list[Tensor] = []
    if mask is not None:
        masks.append(mask if mask.ndim == 2 else layout.once(mask, lambda: mask.unflatten(0, (-1, heads)), "heads"))
    if padding is not None:
        masks.append(layout.once(padding, lambda: padding[:, None, None], "keys"))
    return merged(layout, [Mask(one, "true" if one.dtype is torch.bool else "add") for one in masks])


def _unread_weights(query: Tensor, key: Tensor, value: Tensor, *, averaged: bool) -> Scores:
    """Return weights of keys from which nothing can be computed."""
    positions = next(one.positions for one in (key, query) if isinstance(one, Rows))
    like = query.rows if isinstance(query, Rows) else query
    shape = [query.shape[0], *(() if averaged else query.shape[1:2]), query.shape[-2], key.shape[-2]]
    return Scores(None, like[:0], shape, positions)
