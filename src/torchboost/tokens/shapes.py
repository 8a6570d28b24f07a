"""Shapes and indices of padded tensors that have only some of their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchboost.tokens.rows import BATCH, FLAT, TOKEN, MissingRows, Rows, numbered


def permute(x: Rows, order: Sequence[int]) -> Rows:
    """Return the tensor with its dimensions in another order."""
    dims = [x.dims[dim] for dim in order]
    features = [dim for dim in dims if dim >= 0]
    return x.arranged(dims) if features == sorted(features) else x.of(x.rows, dims, x.fill)


def unsqueeze(x: Rows, dim: int) -> Rows:
    """Insert a dimension of size 1."""
    place = dim if dim >= 0 else dim + x.ndim + 1
    before = sum(number >= 0 for number in x.dims[:place])
    dims = [*x.dims[:place], before, *(number + (number >= 0) for number in x.dims[place:])]
    return x.of(x.rows.unsqueeze(before + 1), dims, x.fill)


def squeeze(x: Rows, dim: int) -> Rows:
    """Remove a dimension, if it has size 1."""
    if x.shape[dim] != 1:
        return x
    rows = x.rows.squeeze(x.feature(dim))
    place = dim % x.ndim
    return x.of(rows, numbered([*x.dims[:place], *x.dims[place + 1 :]]), x.fill)


def expand(x: Rows, shape: Sequence[int]) -> Rows:
    """Repeat features of size 1."""
    if x.ndim != len(shape):
        raise MissingRows("it adds dimensions")
    sizes = [-1]
    for dim, size, present in zip(x.dims, shape, x.shape, strict=True):
        if dim >= 0:
            sizes.append(size)
        elif size not in (-1, present):
            raise MissingRows("it repeats positions")
    return x.of(x.rows.expand(sizes), None, x.fill)


def completed(x: Tensor, sizes: Sequence[Any]) -> list[int]:
    """Return the shape that ``view`` and ``reshape`` are given, as numbers or as one sequence, without a -1."""
    given = list(sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes)
    rest = math.prod(size for size in given if size != -1)
    return [math.prod(x.shape) // max(rest, 1) if size == -1 else size for size in given]


def reshape(x: Rows, shape: Sequence[int]) -> Rows:
    """Return the tensor in another shape, in which no dimension joins positions with features."""
    sizes = completed(x, shape)
    if math.prod(sizes) != math.prod(x.shape) or not math.prod(sizes):
        raise MissingRows("it has another number of entries")
    dims: list[int] = []
    features: list[int] = []
    for old, new in _groups(list(zip(x.dims, x.shape, strict=True)), sizes):
        special = [dim for dim in old if dim < 0]
        if not special:
            dims += [0] * len(new)
            features += new
        elif len(special) < len(old):
            raise MissingRows("it joins positions with features")
        else:
            dims += _positions(x, special, new)
    if features == [size for dim, size in zip(x.dims, x.shape, strict=True) if dim >= 0]:
        return x.arranged(numbered(dims))
    rows = x.rows
    return x.of(rows.reshape(rows.shape[0], *features), numbered(dims), x.fill)


def _groups(old: list[tuple[int, int]], new: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the smallest groups of old and new dimensions that have the same number of entries."""
    while old or new:
        if old and old[0][0] >= 0 and old[0][1] == 1 and not (new and new[0] == 1):
            old.pop(0)
        elif new and new[0] == 1 and not (old and old[0][1] == 1):
            yield [], [new.pop(0)]
        else:
            dim, size = old.pop(0)
            dims, sizes, target = [dim], [new.pop(0)], 0
            target = sizes[0]
            while size != target:
                if size < target:
                    dim, more = old.pop(0)
                    dims.append(dim)
                    size *= more
                else:
                    sizes.append(new.pop(0))
                    target *= sizes[-1]
            yield dims, sizes


def _positions(x: Rows, special: list[int], new: list[int]) -> list[int]:
    """Return the dimensions that batch and length become."""
    pair = [x.positions.batch, x.positions.length]
    if len(special) == len(new) == 1:
        return special
    if special == [BATCH, TOKEN] and len(new) == 1:
        return [FLAT]
    if special in ([FLAT], [BATCH, TOKEN]) and new == pair:
        return [BATCH, TOKEN]
    raise MissingRows("it joins positions otherwise")


def indexed(x: Rows, index: Any) -> Tensor:
    """Return ``x[index]``."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if len(parts) == 1 and isinstance(parts[0], Tensor):
        return _masked(x, parts[0])
    advanced = [part for part in parts if isinstance(part, (Tensor, list))]
    if len(advanced) > 1 or (advanced and any(isinstance(part, int) for part in parts)):
        return _pairs(x, parts)
    count = x.ndim - sum(part is not None and part is not Ellipsis for part in parts)
    ellipses = [place for place, part in enumerate(parts) if part is Ellipsis]
    first = ellipses[0] if ellipses else len(parts)
    parts[first : first + 1] = [slice(None)] * count
    place = 0
    for number, part in enumerate(parts):
        if part is None:
            x, place = unsqueeze(x, place), place + 1
        elif isinstance(part, slice):
            x, place = sliced(x, place, part), place + 1
        elif isinstance(part, int) and not isinstance(part, bool):
            entry = selected(x, place, part)
            if not isinstance(entry, Rows):
                return entry[(*[slice(None)] * place, *parts[number + 1 :])]  # a view of a tensor that the memory knows
            x = entry
        elif isinstance(part, (Tensor, list)):
            x, place = _chosen(x, place, part), place + 1
        else:
            raise MissingRows("its index is of another kind")
    return x


def _chosen(x: Rows, place: int, part: Tensor | list[Any]) -> Rows:
    """Return some entries of a feature."""
    index = torch.as_tensor(part, device=x.device)
    if isinstance(part, Rows) or index.ndim != 1 or index.dtype is not torch.int64:
        raise MissingRows("its index is of another kind")
    dim = x.feature(place)
    return x.of(x.rows[(slice(None),) * dim + (index,)], None, x.fill)


def sliced(x: Rows, place: int, part: slice) -> Rows:
    """Return a slice of one dimension."""
    start, stop, step = part.indices(x.shape[place])
    if (start, stop, step) == (0, x.shape[place], 1):
        return x
    dim = x.dims[place]
    if dim >= 0:
        return x.of(x.rows[(slice(None),) * (dim + 1) + (part,)], None, x.fill)
    if dim != TOKEN or step != 1:
        raise MissingRows("it takes a part of the batch")
    positions, rows = x.positions.crop(start, max(start, stop))
    return x.like(x.base.index_select(0, rows), positions, x.dims, x.later, x.fill).sharing(x)


def selected(x: Rows, place: int, number: int) -> Tensor:
    """Return one entry of a dimension."""
    dim = x.dims[place]
    if dim >= 0:
        return x.of(x.rows.select(dim + 1, number), numbered([*x.dims[:place], *x.dims[place + 1 :]]), x.fill)
    if dim != TOKEN:
        raise MissingRows("it takes one sequence")
    if not x.positions.on_host[:, number].all():
        raise MissingRows("it reads padded positions")
    taken = x.picked(x.positions.row_of[:, number])  # (batch, features...)
    rest = [dim for dim in x.dims if dim != TOKEN]
    taken = taken.movedim(0, rest.index(BATCH))
    x.memory.copied(taken)
    return taken


def _present(rows: Tensor) -> Tensor:
    if bool((rows < 0).any()):
        raise MissingRows("it reads padded positions")
    return rows


def _masked(x: Rows, index: Tensor) -> Tensor:
    """Return the positions at which a mask is true."""
    if index.dtype is torch.bool and x.dims[:2] == (BATCH, TOKEN) and index.shape == x.positions.mask.shape:
        return x.picked(_present(x.positions.row_of[index]))
    if x.dims[:1] == (FLAT,) and index.ndim == 1:
        return x.picked(_present(x.positions.row_of.flatten()[index]))
    raise MissingRows("its index is of another kind")


def _pairs(x: Rows, parts: list[Any]) -> Tensor:
    """Return the positions that are named by sequence and token."""
    if len(parts) != 2 or x.dims[:2] != (BATCH, TOKEN) or not all(map(_is_index, parts)):
        raise MissingRows("its index is of another kind")
    rows = _present(x.positions.row_of[tuple(parts)])
    return x.picked(rows.flatten()).unflatten(0, rows.shape)


def _is_index(part: Any) -> bool:
    return isinstance(part, (Tensor, list, int)) and not isinstance(part, bool)
