"""``torch.einsum`` of two tensors, as layers and attention use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchboost.tokens.answers import table
from torchboost.tokens.rows import BATCH, TOKEN, MissingRows, Rows, numbered
from torchboost.tokens.scores import Scores, product
from torchboost.tokens.shapes import permute


def einsum_of_rows(func: Any, equation: str, *operands: Any) -> Tensor:
    """Return a product with weights, or the scores of queries and keys."""
    (one, two), names, out = _parsed(equation, operands)
    if isinstance(one, Rows) and isinstance(two, Rows):
        return _scores(one, two, names, out)
    x: Any = one if isinstance(one, Rows) else two
    place = 0 if x is one else 1
    batch, token = (names[place][x.dims.index(dim)] for dim in (BATCH, TOKEN))
    if {batch, token} & set(names[1 - place]):
        return _scores(one, two, names, out)
    kept = names[place].replace(batch, "").replace(token, "")
    parts = [names[1 - place]] * 2
    parts[place] = token + kept
    rest = out.replace(batch, "").replace(token, "")
    values = [one, two]
    values[place] = x.rows
    rows = torch.einsum(f"{parts[0]},{parts[1]}->{token}{rest}", *values)
    return x.of(rows, numbered([{batch: BATCH, token: TOKEN}.get(name, 0) for name in out]))


def _averages(func: Any, equation: str, *operands: Any) -> Tensor:
    """Return the averages of values with weights."""
    (weights, values), names, out = _parsed(equation, operands)
    batch, *heads, query, key = names[0]
    width = [name for name in names[1] if name not in names[0]]
    if len(width) != 1 or set(names[1]) != {batch, *heads, key, *width}:
        raise MissingRows("its equation is of another kind")
    averages = product(weights, _ordered(values, names[1], [batch, *heads, key, *width]))
    return _ordered(averages, [batch, *heads, query, *width], out)


def _scores(one: Tensor, two: Tensor, names: Sequence[str], out: str) -> Tensor:
    batch, *heads, query, key = out
    width = [name for name in names[0] if name not in out]
    same = {batch, *heads, *width}
    if len(width) != 1 or set(names[0]) != {*same, query} or set(names[1]) != {*same, key}:
        raise MissingRows("its equation is of another kind")
    return product(
        _ordered(one, names[0], [batch, *heads, query, *width]), _ordered(two, names[1], [batch, *heads, *width, key])
    )


def _parsed(equation: str, operands: Any) -> tuple[Sequence[Tensor], list[str], str]:
    """Return the operands, and the names of the dimensions of each and of the result."""
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    left, arrow, out = equation.replace(" ", "").partition("->")
    names = left.split(",")
    clear = arrow and "." not in equation and all(len(set(one)) == len(one) for one in (*names, out))
    if not clear or not set(out) <= set(left) or [len(one) for one in names] != [one.ndim for one in tensors]:
        raise MissingRows("its equation is of another kind")
    if len(tensors) != 2:
        raise MissingRows("it has another number of operands")
    sizes = {named for own, tensor in zip(names, tensors, strict=True) for named in zip(own, tensor.shape, strict=True)}
    if len(dict(sizes)) < len(sizes):
        raise MissingRows("its sizes broadcast")
    return tensors, names, out


def _ordered(x: Tensor, names: Sequence[str], order: Sequence[str]) -> Tensor:
    """Return the tensor with its named dimensions in another order."""
    places = [[*names].index(name) for name in order]
    if len(places) != x.ndim:
        raise MissingRows("its equation is of another kind")
    return permute(x, places) if isinstance(x, Rows) else x.permute(places)


Scores.answers = {**Scores.answers, **table({_averages: "einsum"})}
