"""Attention of sequences without their padding."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.core.torch_private import attention_of_packed_rows
from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import MissingRows, Rows
from torchboost.tokens.scores import EXCLUDED, sequences

__all__ = ["scaled_dot_product_attention"]

_ALL, _CAUSAL = (None, False), (None, True)
_SIMPLE = _ALL, _CAUSAL
_ALIKE = 0.75
"""Sequences are computed together if the shortest has this share of the length of the longest."""

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
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` for the sequences of a padded batch.

    The mask must exclude the padding for every query that is computed. If nothing else remains of it, sequences of
    about the same length are computed together, and all of them where a kernel takes packed rows.
    """
    queries, keys, others = (one.positions if isinstance(one, Rows) else None for one in (query, key, value))
    if keys is not others:
        raise MissingRows("keys and values have different layouts")
    parts = [sequences(one, -2) for one in (query, key, value)]
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3 or None in parts:
        raise MissingRows("its tensors have other dimensions")
    masks = _masks(query, queries, keys, attn_mask, is_causal)
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    simple = any(all(mask is one for mask in masks) for one in _SIMPLE)
    rows = [one for one in (query, key, value) if isinstance(one, Rows) and one.positions.index.numel()]
    if simple and len(rows) == len(parts):
        own, others, values = rows
        return own.of(_together(own, others, values, masks[0] is _CAUSAL, options))
    outputs = []
    for (mask, causal), *one in zip(masks, *parts, strict=True):
        q, k, v = (part[None] for part in one)
        outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)[0])
    if not isinstance(query, Rows):
        return torch.stack(outputs)
    return query.of(torch.cat([one.movedim(-2, 0) for one in outputs]))


class _Group(NamedTuple):
    """Sequences that are computed together, as a batch that is padded to the longest of them.

    Args:
        size: The number of sequences.
        queries: The number of queries of each.
        keys: The number of keys of each.
        mask: True at each key that is computed; None if all are. Shape (size, keys).
    """

    size: int
    queries: int
    keys: int
    mask: Tensor | None


class _Groups(NamedTuple):
    """All sequences of a batch, in groups.

    Args:
        groups: In the order of their places.
        queries: The row of each place.
        keys: The row of each place.
        places: The place of each row of the queries.
    """

    groups: list[_Group]
    queries: Tensor
    keys: Tensor
    places: Tensor


def _together(query: Rows, key: Rows, value: Rows, causal: bool, options: dict[str, Any]) -> Tensor:
    """Return the rows of attention in which a query sees all keys of its sequence, or those before it."""
    packed = attention_of_packed_rows(
        query.rows, key.rows, value.rows, query.positions.packed, key.positions.packed, causal=causal, **options
    )
    if packed is not None:
        return packed
    batch = query.positions.once(key.positions.mask, lambda: _grouped(query.positions, key.positions), "groups")
    counts = [(one.size * one.queries, one.size * one.keys) for one in batch.groups]
    query_parts = query.rows.index_select(0, batch.queries).split([count for count, _ in counts])
    key_parts, value_parts = (
        part.rows.index_select(0, batch.keys).split([count for _, count in counts]) for part in (key, value)
    )
    outputs = []
    for group, *one in zip(batch.groups, query_parts, key_parts, value_parts, strict=True):
        q, k, v = (part.unflatten(0, (group.size, -1)).movedim(1, -2) for part in one)
        mask = None if causal or group.mask is None else group.mask[(slice(None), *(None,) * (q.ndim - 2))]
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, **options)
        outputs.append(output.movedim(-2, 1).flatten(0, 1))
    return torch.cat(outputs).index_select(0, batch.places)


def _grouped(queries: Layout, keys: Layout) -> _Groups:
    """Group the sequences of a batch by their lengths."""
    lengths = list(zip(keys.lengths, queries.lengths, strict=True))
    members: list[list[int]] = []
    for one in sorted(range(queries.batch), key=lambda one: lengths[one], reverse=True):
        if 0 in lengths[one]:
            continue
        if members and _are_alike(lengths[one], [lengths[other] for other in members[-1]]):
            members[-1].append(one)
        else:
            members.append([one])
    groups, key_rows, query_rows, places = [], [], [], torch.empty(queries.index.numel(), dtype=torch.long)
    for group in members:
        own_keys, present = _rows(keys, group)
        own_queries, asking = _rows(queries, group)
        before = sum(one.size * one.queries for one in groups)
        places[own_queries[asking]] = before + torch.arange(own_queries.numel()).view_as(own_queries)[asking]
        mask = None if present.all() else present.to(keys.mask.device)
        groups.append(_Group(len(group), own_queries.shape[1], own_keys.shape[1], mask))
        key_rows.append(own_keys.flatten())
        query_rows.append(own_queries.flatten())
    device = keys.mask.device
    return _Groups(groups, torch.cat(query_rows).to(device), torch.cat(key_rows).to(device), places.to(device))


def _are_alike(lengths: tuple[int, int], group: list[tuple[int, int]]) -> bool:
    """Whether a sequence is not much shorter than the longest of a group, in keys and in queries."""
    return all(own >= _ALIKE * max(others) for own, others in zip(lengths, zip(*group, strict=True), strict=True))


def _rows(layout: Layout, group: list[int]) -> tuple[Tensor, Tensor]:
    """Return the rows of sequences, each padded to the longest by its last row, and which of them are its own."""
    lengths = torch.tensor([layout.lengths[one] for one in group])[:, None]
    starts = torch.tensor([0, *accumulate(layout.lengths)])[group][:, None]
    tokens = torch.arange(int(lengths.max()))
    return starts + tokens.clamp(max=lengths - 1), tokens < lengths


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
