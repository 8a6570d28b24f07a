"""Attention of sequences without their padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.core.torch_private import attention_of_packed_rows, version
from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows, Rows

__all__ = ["EXCLUDED", "Mask", "attention", "merged", "sequences"]

EXCLUDED = -9e3
"""A smaller entry of a mask that is added, next to scores of usual size, gives a weight of exactly 0."""
_ALL, _CAUSAL = (None, False), (None, True)
_SIMPLE = _ALL, _CAUSAL
_ALIKE = 0.75
"""Sequences are computed together if the shortest has this share of the length of the longest."""

Mask = tuple[Tensor, str]
"""A mask that broadcasts with scores: one to "add", or booleans of which "true" or "false" excludes a key."""
Remains = tuple[Tensor | None, bool]
"""What remains of a mask for one sequence, and whether it is causal."""


def attention(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` for the sequences of a padded batch.

    The mask must exclude the padding for every query that is computed. If nothing else remains of it, sequences of
    about the same length are computed together, and all of them where a kernel takes packed rows.

    Args:
        func: Computes it for whole tensors: that function, or another one with its arguments.
        query: Shape (batch, heads..., queries, width), like the other two.
        key: See ``query``.
        value: See ``query``.
        attn_mask: As of that function, like those that follow.
        dropout_p: See ``attn_mask``.
        is_causal: See ``attn_mask``.
        **options: See ``attn_mask``.
    """
    queries, keys, others = (one.positions if isinstance(one, Rows) else None for one in (query, key, value))
    if keys is not others:
        raise MissingRows("keys and values have different layouts")
    parts = [sequences(one) for one in (query, key, value)]
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3 or None in parts:
        raise MissingRows("its tensors have other dimensions")
    masks = _masks(query, queries, keys, attn_mask, is_causal)
    options["dropout_p"] = dropout_p
    simple = any(all(mask is one for mask in masks) for one in _SIMPLE)
    rows = [one for one in (query, key, value) if isinstance(one, Rows) and one.positions.index.numel()]
    if simple and len(rows) == len(parts):
        own, others, values = rows
        return own.of(_together(func, own, others, values, masks[0] is _CAUSAL, options))
    outputs: list[Tensor] = []
    for (mask, causal), *one in zip(masks, *parts, strict=True):
        q, k, v = (part[None] for part in one)
        outputs.append(func(q, k, v, attn_mask=mask, is_causal=causal, **options)[0])
    if not isinstance(query, Rows):
        return torch.stack(outputs)
    return query.of(torch.cat([one.movedim(-2, 0) for one in outputs]))


def sequences(x: Tensor) -> Sequence[Tensor] | None:
    """Return each sequence by itself, without its padding: shape (..., length, width). None in another order."""
    if not isinstance(x, Rows):
        return x.unbind(0)
    if x.dims[0] != BATCH or x.dims[-2] != TOKEN:
        return None
    return [part.movedim(0, x.ndim - 3) for part in x.rows.split(x.positions.lengths)]


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


def _together(func: Any, query: Rows, key: Rows, value: Rows, causal: bool, options: dict[str, Any]) -> Tensor:
    """Return the rows of attention in which a query sees all keys of its sequence, or those before it."""
    if func is F.scaled_dot_product_attention:
        places = query.positions.packed, key.positions.packed
        packed = attention_of_packed_rows(query.rows, key.rows, value.rows, *places, causal=causal, **options)
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
        output = func(q, k, v, attn_mask=mask, is_causal=causal, **options)
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


def merged(layout: Layout, masks: Sequence[Mask]) -> Tensor | None:
    """Return masks as the one that :func:`attention` takes, the same tensor for all layers that share them."""
    if len(masks) < 2 and all(how == "add" for _, how in masks):
        return masks[0][0] if masks else None
    if any(mask.requires_grad for mask, _ in masks):
        return _merged(masks)
    kind = tuple((id(mask), version(mask), how) for mask, how in masks)
    return layout.once(masks[0][0], lambda: (_merged(masks), masks), ("merged", kind))[0]


def _merged(masks: Sequence[Mask]) -> Tensor:
    seen = [mask if how == "false" else ~mask for mask, how in masks if how != "add"]
    added = [mask for mask, how in masks if how == "add"]
    if not seen:
        return sum(added[1:], start=added[0])
    kept = functools.reduce(torch.logical_and, seen)
    return torch.where(kept, sum(added[1:], start=added[0]), -math.inf) if added else kept


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
    whole, kind = mask[(None,) * (query.ndim - mask.ndim)], ("attention", query.ndim, queries, keys)
    if mask.requires_grad:  # what it is may be kept, its parts belong to the graph of this call
        layout.once(mask, lambda: _in_common(whole.detach(), queries, keys, layout), kind)
        return _parts(whole, queries, keys, layout)

    def remains() -> list[Remains]:
        common = _in_common(whole, queries, keys, layout)
        return _parts(whole, queries, keys, layout) if common is None else [common] * layout.batch

    return layout.once(mask, remains, kind)


def _in_common(mask: Tensor, queries: Layout | None, keys: Layout | None, layout: Layout) -> Remains | None:
    """Return what remains of a mask in all sequences, if it is nothing or causality; None otherwise.

    Raises:
        MissingRows: It does not exclude the padding for a query that is computed, or excludes everything else.
    """
    sizes = ((0, layout.batch), (-2, queries.length if queries else mask.shape[-2]))
    strange = any(mask.shape[place] not in (1, size) for place, size in sizes)
    if strange or (keys is not None and mask.shape[-1] != keys.length):
        raise MissingRows("its mask is of another kind")
    excluded = ~mask if mask.dtype is torch.bool else mask < EXCLUDED
    absent, counts = layout.mask.new_zeros(()), layout.mask.new_ones(())
    if keys is not None:
        absent = ~keys.mask[(slice(None), *(None,) * (mask.ndim - 2))]  # (batch, ..., 1, keys)
    if queries is not None:
        asked = queries.mask if mask.shape[-2] > 1 else queries.mask.any(1, keepdim=True)
        counts = asked[(slice(None), *(None,) * (mask.ndim - 2))].transpose(-1, -2)  # (batch, ..., queries or 1, 1)
    rest = layout.mask.new_zeros(()) if mask.dtype is torch.bool else ~excluded & (mask != 0)
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    wrong = [~excluded & absent & counts, (excluded | absent).all(-1, keepdim=True) & counts]
    wrong += [((excluded != (absent | more)) | rest) & counts for more in (torch.zeros_like(later), later)]
    padding, nothing, some, not_causal = torch.stack([one.any() for one in wrong]).tolist()
    if padding or nothing:
        raise MissingRows("attention sees the padding" if padding else "a query sees nothing")
    if not some and keys is not None:
        return _ALL
    return None if not_causal or queries is not keys or mask.shape[-2] != mask.shape[-1] else _CAUSAL


def _parts(mask: Tensor, queries: Layout | None, keys: Layout | None, layout: Layout) -> list[Remains]:
    """Return the mask of each sequence."""
    parts: list[Remains] = []
    for sequence in range(layout.batch):
        part = mask if mask.shape[0] == 1 else mask[sequence : sequence + 1]
        if queries is not None and mask.shape[-2] > 1:
            part = part.index_select(-2, queries.parts[sequence][0])
        part = part if keys is None else part.index_select(-1, keys.parts[sequence][0])
        parts.append((part, False))
    return parts
