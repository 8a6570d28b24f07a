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

EXCLUDED = -9e3
"""A smaller entry of a mask that is added, next to scores of usual size, gives a weight of exactly 0."""
_SURE = -1e8
"""An entry down to which this is so next to scores of any size."""
_USUAL = -EXCLUDED / 4
"""Scores up to this size are of usual size. The scores of padding are not known: they may be almost twice as large."""
_ALIKE = 0.75
"""Sequences are computed together if the shortest has this share of the length of the longest."""


class Mask(NamedTuple):
    """A mask that broadcasts with scores."""

    tensor: Tensor
    how: str
    """To ``"add"``, or the boolean that excludes a key, ``"true"`` or ``"false"``."""
    least: float = -math.inf
    """The score of keys that booleans exclude. Of a mask that is added, the least score that it leaves."""


class _Found(NamedTuple):
    """What a mask excludes.

    Args:
        rest: The mask of each sequence, or whether attention is causal if nothing else remains of the mask.
        weak: Whether entries are weak (:func:`is_weak`).
        void: Whether it excludes all keys for some query, which may be padding. If it is added, by -inf.
        low: Whether an entry that is added lowers a score about as much as a weak entry.
    """

    rest: bool | list[Tensor] | None
    weak: bool = False
    void: bool = False
    low: bool = False


def is_weak(least: Any, dtype: torch.dtype) -> Any:
    """Whether scores may be so large that a score of this value gives a weight above 0. Takes a number or a tensor."""
    return least > max(_SURE, torch.finfo(dtype).min)


def attention(
    func: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    score: Callable[[Tensor], Tensor] | None = None,
    weak: bool = False,
    undefined: bool = False,
    **options: Any,
) -> Tensor:
    """Compute ``torch.nn.functional.scaled_dot_product_attention`` for the sequences of a padded batch.

    The mask must exclude the padding for every query that is computed. If the mask excludes nothing else, sequences of
    about the same length are computed together, or all sequences if a kernel takes packed rows.

    ``query`` has the shape (batch, heads..., queries, width), ``key`` and ``value`` (batch, heads..., keys, width).
    ``func`` computes whole tensors: that function, or another one with its arguments. ``score`` returns the scores of
    products of queries and keys, which are scaled by default. ``weak`` says whether a mask of booleans stands for a
    number that is weak (:func:`is_weak`), and ``undefined`` whether a query whose scores are all -inf gets NaN.
    """
    queries, keys, others = (one.positions if isinstance(one, Rows) else None for one in (query, key, value))
    if keys is not others:
        raise MissingRows("keys and values have different layouts")
    if not query.ndim == key.ndim == value.ndim or query.ndim < 3 or not all(map(are_sequences, (query, key, value))):
        raise MissingRows("its tensors have other dimensions")
    scale = options.get("scale")
    if scale is not None and not scale > 0:
        raise MissingRows("its scale is not positive")  # kernels for causal attention return NaN
    found = _masks(query, queries, keys, attn_mask, is_causal)
    if undefined and found.void:
        raise MissingRows("padding sees nothing, which gives NaN")
    if weak or found.weak:
        if found.low:
            raise MissingRows("its mask hardly tells what it excludes")
        _check_size(query, key, score or (lambda products: products * (scale or key.shape[-1] ** -0.5)))
    options["dropout_p"] = dropout_p
    rows = [one for one in (query, key, value) if isinstance(one, Rows) and one.positions.index.numel()]
    rest = found.rest
    if isinstance(rest, bool) and len(rows) == 3:
        own, others, values = rows
        return own.of(_together(func, own, others, values, rest, options))
    causal, every = (False, rest) if isinstance(rest, list) else (bool(rest), [None] * query.shape[0])
    outputs: list[Tensor] = []
    for mask, *one in zip(every, *map(_sequences, (query, key, value)), strict=True):
        q, k, v = (part[None] for part in one)
        outputs.append(func(q, k, v, attn_mask=mask, is_causal=causal, **options)[0])
    if not isinstance(query, Rows):
        return torch.stack(outputs)
    return query.of(torch.cat([one.movedim(-2, 0) for one in outputs]))


def are_sequences(x: Tensor) -> bool:
    """Whether a tensor has the batch first and the length before the last dimension, as :func:`_sequences` needs."""
    return not isinstance(x, Rows) or (x.dims[0] == BATCH and x.dims[-2] == TOKEN)


@torch.no_grad()
def _check_size(query: Tensor, key: Tensor, score: Callable[[Tensor], Tensor]) -> None:
    """Raise :class:`MissingRows` if scores may be so large that a weak mask does not exclude."""
    tensors = [one.rows if isinstance(one, Rows) else one for one in (query, key)]
    if all(one.numel() for one in tensors):
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        largest = [torch.linalg.vector_norm(one, dim=-1, dtype=wide).max() for one in tensors]
        products = largest[0] * largest[1] * torch.linspace(-1, 1, 65, device=key.device)
        if not bool(score(products).abs().max() <= _USUAL):
            raise MissingRows("its scores may be as large as its mask")


def _sequences(x: Tensor) -> Sequence[Tensor]:
    """Return each sequence by itself, without its padding: shape (..., length, width)."""
    if not isinstance(x, Rows):
        return x.unbind(0)
    return [part.movedim(0, x.ndim - 3) for part in x.rows.split(x.positions.lengths)]


Group = tuple[torch.Size, torch.Size, Tensor | None]
"""Sequences that are computed together, padded to the longest of them: the shapes (sequences, queries) and (sequences,
keys), and the keys that are not padding, or None if no key is padding."""


def _together(func: Any, query: Rows, key: Rows, value: Rows, causal: bool, options: dict[str, Any]) -> Tensor:
    """Return the rows of attention in which a query sees all keys of its sequence, or only earlier keys."""
    if func is F.scaled_dot_product_attention and 0 not in (*query.positions.lengths, *key.positions.lengths):
        starts = query.positions.packed, key.positions.packed
        packed = attention_of_packed_rows(query.rows, key.rows, value.rows, *starts, causal=causal, **options)
        if packed is not None:
            return packed
    groups, query_rows, key_rows, places = query.positions.once(
        key.positions.mask, lambda: _grouped(query.positions, key.positions), "groups"
    )
    query_parts = query.rows.index_select(0, query_rows).split([math.prod(shape) for shape, _, _ in groups])
    counts = [math.prod(shape) for _, shape, _ in groups]
    key_parts, value_parts = (part.rows.index_select(0, key_rows).split(counts) for part in (key, value))
    outputs = []
    for (shape, _, present), *one in zip(groups, query_parts, key_parts, value_parts, strict=True):
        q, k, v = (part.unflatten(0, (shape[0], -1)).movedim(1, -2) for part in one)
        mask = None if causal or present is None else present[(slice(None), *(None,) * (q.ndim - 2))]
        output = func(q, k, v, attn_mask=mask, is_causal=causal, **options)
        outputs.append(output.movedim(-2, 1).flatten(0, 1))
    return torch.cat(outputs).index_select(0, places)


def _grouped(queries: Layout, keys: Layout) -> tuple[list[Group], Tensor, Tensor, Tensor]:
    """Return groups of sequences of about one length, the rows of their queries and keys, and each query's place."""
    lengths = list(zip(keys.lengths, queries.lengths, strict=True))
    members: list[list[int]] = []
    for one in sorted(range(queries.batch), key=lambda one: lengths[one], reverse=True):
        if 0 in lengths[one]:
            continue
        if members and _are_alike(lengths[one], [lengths[other] for other in members[-1]]):
            members[-1].append(one)
        else:
            members.append([one])
    groups: list[Group] = []
    query_rows: list[Tensor] = []
    key_rows: list[Tensor] = []
    places, before = torch.empty(queries.index.numel(), dtype=torch.long), 0
    device = keys.mask.device
    for group in members:
        own_keys, present = _rows(keys, group)
        own_queries, asking = _rows(queries, group)
        places[own_queries[asking]] = before + torch.arange(own_queries.numel()).view_as(own_queries)[asking]
        before += own_queries.numel()
        groups.append((own_queries.shape, own_keys.shape, None if present.all() else present.to(device)))
        query_rows.append(own_queries.flatten())
        key_rows.append(own_keys.flatten())
    return groups, torch.cat(query_rows).to(device), torch.cat(key_rows).to(device), places.to(device)


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
    if len(masks) < 2 and all(one.how == "add" for one in masks):
        return masks[0].tensor if masks else None
    if any(one.tensor.requires_grad for one in masks):
        return _merged(masks)
    kind = tuple((id(one.tensor), version(one.tensor), one.how, one.least) for one in masks)
    return layout.once(masks[0].tensor, lambda: (_merged(masks), masks), ("merged", kind))[0]


def _merged(masks: Sequence[Mask]) -> Tensor:
    fills = [one for one in masks if one.how != "add"]
    added = [one.tensor for one in masks if one.how == "add"]
    seen = [one.tensor if one.how == "false" else ~one.tensor for one in fills]
    if not seen:
        return sum(added[1:], start=added[0])
    kept = functools.reduce(torch.logical_and, seen)
    if not added:
        return kept
    total, least = sum(added[1:], start=added[0]), max(one.least for one in fills)
    finite = -math.inf if least == -math.inf else torch.finfo(total.dtype).min
    return torch.where(kept, total, (total + least).clamp(min=finite))


def _masks(query: Tensor, queries: Layout | None, keys: Layout | None, mask: Tensor | None, is_causal: bool) -> _Found:
    """Return what a mask excludes."""
    if mask is None:
        if is_causal and keys is not None and queries is keys and keys.begins_with_rows:
            return _Found(True)
        if is_causal or keys is not None:
            raise MissingRows("attention sees the padding")
        return _Found(False)
    layout = keys or queries
    if is_causal or layout is None or isinstance(mask, Rows) or mask.ndim > query.ndim:
        raise MissingRows("its mask is of another kind")
    whole, wide = mask[(None,) * (query.ndim - mask.ndim)], torch.promote_types(query.dtype, mask.dtype)
    kind = ("attention", query.ndim, wide, queries, keys)
    found: _Found = layout.once(mask, lambda: _found(whole.detach(), wide, queries, keys, layout), kind)
    if mask.requires_grad:  # the parts belong to the graph
        return found._replace(rest=_parts(whole, queries, keys, layout))
    if found.rest is None:
        parts = layout.once(mask, lambda: _parts(whole, queries, keys, layout), (*kind, "parts"))
        return found._replace(rest=parts)
    return found


def _found(mask: Tensor, dtype: torch.dtype, queries: Layout | None, keys: Layout | None, layout: Layout) -> _Found:
    """Return what a mask excludes in all sequences, without its parts: None if more than causality remains of it."""
    sizes = ((0, layout.batch), (-2, queries.length if queries else mask.shape[-2]))
    strange = any(mask.shape[place] not in (1, size) for place, size in sizes)
    if strange or (keys is not None and mask.shape[-1] != keys.length):
        raise MissingRows("its mask is of another kind")
    excluded = void = ~mask if mask.dtype is torch.bool else mask < EXCLUDED
    absent = rest = weak = low = layout.mask.new_zeros(())
    counts = layout.mask.new_ones(())
    if mask.dtype is not torch.bool:
        void, rest, low = mask == -math.inf, ~excluded & (mask != 0), ~excluded & (mask < -_USUAL)
        weak = excluded & is_weak(mask, dtype)
    if keys is not None:
        absent = ~keys.mask[(slice(None), *(None,) * (mask.ndim - 2))]  # (batch, ..., 1, keys)
    if queries is not None:
        asked = queries.mask if mask.shape[-2] > 1 else queries.mask.any(1, keepdim=True)
        counts = asked[(slice(None), *(None,) * (mask.ndim - 2))].transpose(-1, -2)  # (batch, ..., queries or 1, 1)
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    wrong = [~excluded & absent & counts, (excluded | absent).all(-1, keepdim=True) & counts]
    wrong += [((excluded != (absent | more)) | rest) & counts for more in (torch.zeros_like(later), later)]
    wrong += [weak, low, void.all(-1)]
    padding, nothing, some, not_causal, has_weak, has_low, is_void = torch.stack([one.any() for one in wrong]).tolist()
    if padding or nothing:
        raise MissingRows("attention sees the padding" if padding else "a query sees nothing")
    if not some and keys is not None:
        return _Found(False, has_weak, is_void, has_low)
    causal = None if not_causal or queries is not keys or mask.shape[-2] != mask.shape[-1] else True
    return _Found(causal, has_weak, is_void, has_low)


def _parts(mask: Tensor, queries: Layout | None, keys: Layout | None, layout: Layout) -> list[Tensor]:
    """Return the mask of each sequence."""
    parts: list[Tensor] = []
    for sequence in range(layout.batch):
        part = mask if mask.shape[0] == 1 else mask[sequence : sequence + 1]
        if queries is not None and mask.shape[-2] > 1:
            part = part.index_select(-2, queries.parts[sequence][0])
        parts.append(part if keys is None else part.index_select(-1, keys.parts[sequence][0]))
    return parts
