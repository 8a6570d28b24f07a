"""Attention by hand, recognised by the functions that a model applies to its scores, which are not computed before."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from torchboost.core.torch_private import version
from torchboost.tokens.answers import PaddedRows, of_arguments, table
from torchboost.tokens.attention import EXCLUDED, Mask, are_sequences, attention, is_weak, merged
from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import MissingRows, RowFunction, Rows, in_this_precision
from torchboost.tokens.shapes import permute


class Steps(NamedTuple):
    """The steps of a model from queries and keys to scores.

    Args:
        query: Shape (batch, heads..., queries, width).
        key: Shape (batch, heads..., keys, width).
        multiply: Returns the product of two matrices, in the precision that autocast had.
        entries: Functions of each score by itself.
        masks: Of the scores, after these.
        dropout: Share of the weights that is dropped. None before the softmax.
        factors: Functions that scale the weights.
        read: Other tensors that are read when values come, and how often they had been written to.
    """

    query: Tensor
    key: Tensor
    multiply: Callable[..., Tensor]
    entries: tuple[RowFunction, ...] = ()
    masks: tuple[Mask, ...] = ()
    dropout: float | None = None
    factors: tuple[RowFunction, ...] = ()
    read: tuple[tuple[Tensor, int], ...] = ()

    def scored(self, products: Tensor) -> Tensor:
        """Return the scores of products of queries and keys, before the masks."""
        for entry in self.entries:
            products = entry(products)
        return products


class Scores(PaddedRows):
    """A score, or after a softmax a weight, for each query and key. Shape (batch, heads..., queries, keys).

    Args:
        steps: Its computation. None if nothing may be computed from it.
        like: An empty tensor of its precision.
        shape: Of the padded tensor.
        positions: Of its queries or keys.
    """

    precedence: ClassVar[int] = 1
    steps: Steps | None

    def __new__(cls, steps: Steps | None, like: Tensor, shape: Sequence[int], positions: Layout) -> Scores:
        """Make a tensor without memory."""
        scores = cls.made(shape, like, like, positions)
        scores.steps = steps
        positions.note(scores)
        return scores

    def whole(self) -> Tensor:
        """Raise :class:`MissingRows`: the padding has scores as well."""
        raise MissingRows("it needs the scores of padding")

    def then(self, function: RowFunction) -> Self:
        """Return the same scores, in the precision that a function gives them."""
        return self.like(self.steps, function(self.base), self.shape, self.positions).sharing(self)

    def after(self, *, weights: bool = False, **changes: Any) -> Scores:
        """Return the scores, or weights, after one more step."""
        if self.steps is None or (self.steps.dropout is not None) is not weights:
            raise MissingRows("it is not a step of attention")
        return Scores(self.steps._replace(**changes), self.base, self.shape, self.positions).sharing(self)

    def masked(self, mask: Any, how: str, least: float = -math.inf) -> Scores:
        """Return the scores after a mask."""
        if self.steps is None or isinstance(mask, Rows) or not isinstance(mask, Tensor) or mask.ndim > self.ndim:
            raise MissingRows("its mask is of another kind")
        if not (mask.is_floating_point() if how == "add" else mask.dtype is torch.bool):
            raise MissingRows("its mask is of another kind")
        sizes = (1,) * (self.ndim - mask.ndim) + tuple(mask.shape)
        if any(size not in (1, own) for size, own in zip(sizes, self.shape, strict=True)):
            raise MissingRows("it adds sequences")
        return self.after(
            masks=(*self.steps.masks, Mask(mask, how, least)), read=(*self.steps.read, (mask, version(mask)))
        )

    def averages(self, values: Tensor) -> Tensor:
        """Return the averages of values by these weights."""
        steps = self.after(weights=True).steps
        if steps is None or isinstance(values, Scores) or values.ndim != self.ndim:
            raise MissingRows("it multiplies scores")
        if any(version(tensor) != then for tensor, then in steps.read):
            raise MissingRows("what it is made of was written to")
        by_hand = functools.partial(_attended, steps)
        least = [one.least for one in steps.masks]
        return attention(
            by_hand,
            steps.query,
            steps.key,
            values,
            merged(self.positions, steps.masks),
            steps.dropout or 0.0,
            score=steps.scored,
            weak=any(is_weak(one, self.dtype) for one in least),
            undefined=-math.inf in least,
        )


def _attended(
    steps: Steps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> Tensor:
    """Compute ``scaled_dot_product_attention`` as models do by hand."""
    scores = steps.scored(steps.multiply(query, key.transpose(-1, -2)))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_seen = attn_mask.dtype is torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_seen else scores + attn_mask
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    for factor in steps.factors:
        weights = factor(weights)
    return torch.matmul(weights, value)


def product(one: Tensor, two: Tensor) -> Tensor:
    """Return the matrix product of two tensors of which at least one has rows: scores, or averages by weights."""
    if isinstance(one, Scores):
        return one.averages(two)
    if isinstance(two, Scores) or one.ndim != two.ndim or one.ndim < 3 or one.shape[0] != two.shape[0]:
        raise MissingRows("it multiplies padded tensors")
    order = [*range(two.ndim - 2), two.ndim - 1, two.ndim - 2]
    key = permute(two, order) if isinstance(two, Rows) else two.permute(order)
    if not (are_sequences(one) and are_sequences(key)):
        raise MissingRows("it multiplies padded tensors")
    positions = next(part.positions for part in (key, one) if isinstance(part, Rows))
    like = torch.matmul(_empty(one), _empty(key).t())
    heads = torch.broadcast_shapes(one.shape[1:-2], key.shape[1:-2])
    shape = [one.shape[0], *heads, one.shape[-2], key.shape[-2]]
    multiply = in_this_precision(like.device.type, torch.matmul)
    query = one.arranged(one.dims) if isinstance(one, Rows) else one  # other rows, as these may be written to
    read = tuple((part, version(part)) for part in (query, key) if not isinstance(part, Rows))
    return Scores(Steps(query, key, multiply, read=read), like, shape, positions)


def _empty(x: Tensor) -> Tensor:
    """Return no vectors of a tensor, with their history. Shape (0, width)."""
    return (x.rows if isinstance(x, Rows) else x)[:0].reshape(0, x.shape[-1])


def _same(func: Any, x: Scores, *args: Any, **kwargs: Any) -> Scores:
    """The same numbers, maybe in another precision."""
    result = x.then(lambda like: func(like, *args, **kwargs))
    if not result.is_floating_point():
        raise MissingRows("it makes integers")
    return _in_range(x, result)


def _in_range(x: Scores, result: Scores) -> Scores:
    """Return the same scores in another precision, if their masks stay finite: otherwise padding may get NaN."""
    masks = x.steps.masks if x.steps is not None and x.steps.dropout is None else ()
    least = [torch.finfo(one.tensor.dtype).min if one.how == "add" else one.least for one in masks]
    if any(-math.inf < one < torch.finfo(result.dtype).min for one in least):
        raise MissingRows("its mask is cast to a smaller range")
    return result


def _sides(one: Any, two: Any) -> tuple[Scores, Any]:
    """Return the scores, and the other argument."""
    if isinstance(one, Scores) is isinstance(two, Scores):
        raise MissingRows("it combines scores")
    return (one, two) if isinstance(one, Scores) else (two, one)


def _alone(func: Any, *args: Any, scales: bool = False, **kwargs: Any) -> Scores:
    """Each score by itself, before the masks, or each weight if the function ``scales``."""
    x = next((arg for arg in args if isinstance(arg, Scores)), None)
    if x is None:
        raise MissingRows("it has the scores by name")
    others = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor) and arg is not x]
    scales = scales and x.steps is not None and x.steps.dropout is not None
    is_twice = scales and sum(arg is x for arg in (*args, *kwargs.values())) > 1
    combines = is_twice or any(isinstance(arg, Rows) or arg.ndim for arg in others)
    if x.steps is None or combines or (x.steps.masks and not scales):
        raise MissingRows("it changes masked scores, or combines them")

    def entry(scores: Tensor) -> Tensor:
        return func(*(scores if arg is x else arg for arg in args), **kwargs)

    read = (*x.steps.read, *((arg, version(arg)) for arg in others))
    if scales:
        return x.after(weights=True, factors=(*x.steps.factors, entry), read=read).then(entry)
    return x.after(entries=(*x.steps.entries, entry), read=read).then(entry)


def _times(func: Any, *args: Any, **kwargs: Any) -> Scores:
    """Scores, or weights, times a number."""
    return _alone(func, *args, scales=True, **kwargs)


def _divided(func: Any, x: Any, *args: Any, **kwargs: Any) -> Scores:
    """Scores, or weights, divided by a number, or a number divided by scores."""
    return _alone(func, x, *args, scales=isinstance(x, Scores) and not kwargs, **kwargs)


def _added(func: Any, one: Any, two: Any) -> Scores:
    x, mask = _sides(one, two)
    return x.masked(mask, "add") if isinstance(mask, Tensor) and mask.ndim else _alone(func, one, two)


def _raised(func: Any, one: Any, two: Any) -> Scores:
    """The larger one of each score and a number that excludes."""
    x, value = _sides(one, two)
    least, masks = _excluding(value), () if x.steps is None else x.steps.masks
    if not masks:
        return _alone(func, one, two)
    return x.after(masks=tuple(one._replace(least=max(one.least, least)) for one in masks))


def _excluding(value: Any) -> float:
    """Return a number, or raise :class:`MissingRows` unless a score of this value gives a weight of 0."""
    if isinstance(value, Rows) or (isinstance(value, Tensor) and value.ndim) or not float(value) < EXCLUDED:
        raise MissingRows("attention sees the padding")
    return float(value)


def _masked_fill(func: Any, x: Scores, mask: Any, value: Any) -> Scores:
    return x.masked(mask, "true", _excluding(value))


def _where(func: Any, mask: Any, one: Any, two: Any) -> Scores:
    x, value = _sides(one, two)
    return x.masked(mask, "false" if x is one else "true", _excluding(value))


def _softmax(func: Any, x: Scores, dim: int, *args: Any, **kwargs: Any) -> Scores:
    if dim not in (-1, x.ndim - 1):
        raise MissingRows("it combines queries")
    return _in_range(x, x.after(dropout=0.0).then(lambda like: func(like, -1, *args, **kwargs)))


def _dropout(func: Any, x: Scores, p: float = 0.5, training: bool = True, **kwargs: Any) -> Scores:
    dropped = x.after(weights=True, dropout=p if training else 0.0)
    if x.steps is not None and x.steps.dropout:
        raise MissingRows("it drops weights twice")
    return dropped


def _getitem(func: Any, x: Scores, index: Any) -> Scores:
    parts = index if isinstance(index, tuple) else (index,)
    whole = all(isinstance(part, slice) for part in parts) and len(parts) <= x.ndim
    if not whole or any(part.indices(size) != (0, size, 1) for part, size in zip(parts, x.shape, strict=False)):
        raise MissingRows("it takes some of the scores")
    return x


Scores.answers = table(
    {
        _same: "float half bfloat16 double to contiguous clone",
        _alone: "sub subtract __sub__ tanh sigmoid exp abs neg relu gelu silu square",
        _times: "mul multiply __mul__ __rmul__",
        _divided: "div divide true_divide __truediv__",
        _added: "add __add__ __radd__",
        _raised: "maximum max",
        _masked_fill: "masked_fill",
        _where: "where",
        _softmax: "softmax",
        _dropout: "dropout",
        of_arguments(product): "matmul __matmul__ bmm",
        _getitem: "__getitem__",
    }
)
