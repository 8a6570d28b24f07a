"""Attention of each sequence by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import MissingRows, Rows
from torchboost.tokens.scores import EXCLUDED, sequences

__all__ = ["scaled_dot_product_attention"]

_ALL, _CAUSAL = (None, False), (None, True)

Remains = tuple[Tensor | None, bool]
"""What remains of a mask for one sequence, and whether it is causal."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` for each sequence of a padded batch.

    The mask must exclude the padding for every query that is computed.
    """
    queries, keys, others = (one.positions if isinstance(one, Rows) else None for one in (query, key, value))
    if keys is not others:
        raise MissingRows("keys and values have different layouts")
    parts = [sequences(one, -2) for one in (query, key, value)]
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3 or None in parts:
        raise MissingRows("its tensors have other dimensions")
    masks = _masks(query, queries, keys, attn_mask, is_causal)
    outputs = []
    for (mask, causal), *one in zip(masks, *parts, strict=True):
        q, k, v = (part[None] for part in one)
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)[0])
    if not isinstance(query, Rows):
        return torch.stack(outputs)
    return query.of(torch.cat([one.movedim(-2, 0) for one in outputs]))


def _masks(
    query: Tensor, queries: Layout | None, keys: Layout | None, mask: Tensor | None, is_causal: bool
) -> list[Remains]:
    """Return for each sequence what remains of the mask."""
    if mask is None:
        if is_causal and keys is not None and queries is keys and keys.begins_with_rows:
            return [_CAUSAL] * keys.batch
        if is_causal or keys is not None:
            raise MissingRows("attention sees the padding")
        return [_ALL] * query.shape[0]
    layout = keys or queries
    if is_causal or layout is None or isinstance(mask, Rows) or mask.ndim > query.ndim:
        raise MissingRows("its mask is of another kind")
    if mask.requires_grad:
        return _split_mask(mask[(None,) * (query.ndim - mask.ndim)], queries, keys, layout)
    return layout.once(
        mask,
        lambda: _split_mask(mask[(None,) * (query.ndim - mask.ndim)], queries, keys, layout),
        ("attention", query.ndim, queries, keys),
    )


def _split_mask(mask: Tensor, queries: Layout | None, keys: Layout | None, layout: Layout) -> list[Remains]:
    sizes = ((0, layout.batch), (-2, queries.length if queries else 0), (-1, keys.length if keys else 0))
    if any(size and mask.shape[place] not in (1, size) for place, size in sizes) or (keys and mask.shape[-1] == 1):
        raise MissingRows("its mask is of another kind")
    excluded = ~mask if mask.dtype is torch.bool else mask < EXCLUDED
    simple = _simple_mask(mask, excluded, queries, keys)
    if simple is not None:
        return [simple] * layout.batch
    masks: list[Remains] = []
    for sequence in range(layout.batch):
        own = slice(0, 1) if mask.shape[0] == 1 else slice(sequence, sequence + 1)
        part, out = mask[own], excluded[own]
        if queries is not None and mask.shape[-2] > 1:
            present = queries.mask[sequence]
            part, out = part[..., present, :], out[..., present, :]
        if keys is not None:
            present = keys.mask[sequence]
            if not bool(out[..., ~present].all()):
                raise MissingRows("attention sees the padding")
            part, out = part[..., present], out[..., present]
            if bool(out.all(-1).any()):
                raise MissingRows("a query sees nothing")
        masks.append((part, False))
    return masks


def _simple_mask(mask: Tensor, excluded: Tensor, queries: Layout | None, keys: Layout | None) -> Remains | None:
    """Return what remains if it is nothing, or causality in all sequences."""
    if keys is None or (queries is not keys and 0 in keys.lengths):
        return None
    out = ~keys.mask[(slice(None), *(None,) * (mask.ndim - 2))]  # (batch, ..., 1, keys)
    counts = keys.mask.new_ones(()) if queries is None else queries.mask[(slice(None), *(None,) * (mask.ndim - 3))]
    counts = counts if queries is None else counts[..., None]  # (batch, ..., queries, 1)
    rest = keys.mask.new_zeros(()) if mask.dtype is torch.bool else ~excluded & (mask != 0)
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    wrong = [(((excluded != (out | more)) | rest) & counts).any() for more in (torch.zeros_like(later), later)]
    everything, causal = torch.stack(wrong).logical_not().tolist()
    if everything:
        return _ALL
    return _CAUSAL if causal and queries is keys and mask.shape[-2] == mask.shape[-1] else None
