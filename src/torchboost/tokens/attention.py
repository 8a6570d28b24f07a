"""Attention of each sequence by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows, Rows

__all__ = ["scaled_dot_product_attention"]

_EXCLUDED = -1e4
"""A smaller entry of a mask that is added gives a weight of exactly 0."""
_HEADS = (BATCH, 0, TOKEN, 1)


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
    if not isinstance(key, Rows) or not isinstance(value, Rows) or key.positions is not value.positions:
        raise MissingRows("keys and values have different layouts")
    if not all(one.dims == _HEADS for one in (key, value)) or (isinstance(query, Rows) and query.dims != _HEADS):
        raise MissingRows("its tensors have other dimensions")
    if isinstance(attn_mask, Rows) or (isinstance(query, Rows) and query.positions is not key.positions):
        raise MissingRows("its tensors have different layouts")
    masks = _masks(query, key.positions, attn_mask, is_causal)
    lengths = key.positions.lengths
    whole = not isinstance(query, Rows)
    queries = query.unbind(0) if whole else [part.transpose(0, 1) for part in query.rows.split(lengths)]
    outputs = []
    for index, (q, k, v) in enumerate(zip(queries, key.rows.split(lengths), value.rows.split(lengths), strict=True)):
        mask, causal = masks[index]
        parts = (q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None])
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=mask, is_causal=causal, **options)[0])
    if whole:
        return torch.stack(outputs)
    return query.of(torch.cat([one.transpose(0, 1) for one in outputs]))


def _masks(query: Tensor, layout: Layout, mask: Tensor | None, is_causal: bool) -> list[tuple[Tensor | None, bool]]:
    """Return for each sequence what remains of the mask, and whether it is causal."""
    if mask is None:
        if not isinstance(query, Rows) or not (is_causal and layout.begins_with_rows):
            raise MissingRows("attention sees the padding")
        return [(None, True)] * layout.batch
    if is_causal or mask.ndim != 4:
        raise MissingRows("its mask is of another kind")
    with_rows = isinstance(query, Rows)
    seen_with_rows, masks = layout.once(mask, lambda: (with_rows, _split_mask(query, layout, mask)))
    return masks if seen_with_rows == with_rows else _split_mask(query, layout, mask)


def _split_mask(query: Tensor, layout: Layout, mask: Tensor) -> list[tuple[Tensor | None, bool]]:
    excluded = ~mask if mask.dtype is torch.bool else mask < _EXCLUDED
    zero = torch.zeros((), dtype=mask.dtype, device=mask.device)
    masks = []
    for sequence in range(layout.batch):
        own = slice(0, 1) if mask.shape[0] == 1 else slice(sequence, sequence + 1)
        present = layout.mask[sequence]
        part, out = mask[own], excluded[own]
        if isinstance(query, Rows) and mask.shape[2] > 1:
            part, out = part[:, :, present], out[:, :, present]
        if not bool(out[..., ~present].all()):
            raise MissingRows("attention sees the padding")
        part, out = part[..., present], out[..., present]
        if bool(out.all(-1).any()):
            raise MissingRows("a query sees nothing")
        if not bool(out.any()) and (mask.dtype is torch.bool or bool((part == zero).all())):
            masks.append((None, False))
        elif isinstance(query, Rows) and _is_causal(part, out):
            masks.append((None, True))
        else:
            masks.append((part, False))
    return masks


def _is_causal(part: Tensor, out: Tensor) -> bool:
    if part.shape[-1] != part.shape[-2]:
        return False
    later = torch.ones(part.shape[-2:], dtype=torch.bool, device=part.device).triu(1)
    same = bool((out == later).all())
    return same and (part.dtype is torch.bool or not bool(part.masked_fill(later, 0).any()))
