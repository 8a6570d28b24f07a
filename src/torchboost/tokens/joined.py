"""Heads that are joined with the batch, as ``torch.bmm`` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchboost.tokens.answers import PaddedRows, getter, table
from torchboost.tokens.rows import MissingRows, Rows
from torchboost.tokens.scores import Scores, product
from torchboost.tokens.shapes import completed, permute


class Joined(PaddedRows):
    """Rows or scores of padded sequences in the shape (batch * heads, ...), of others in (batch, heads, ...)."""

    precedence: ClassVar[int] = 2
    with_heads: PaddedRows

    def __new__(cls, with_heads: Any) -> Joined:
        """Make a tensor without memory."""
        batch, heads, *rest = with_heads.shape
        one = cls.made((batch * heads, *rest), with_heads, with_heads.base, with_heads.positions)
        one.with_heads, one.needs_grad, one.memory = with_heads, with_heads.needs_grad, with_heads.memory
        return one

    def whole(self) -> Tensor:
        """Return the padded tensor."""
        return self.with_heads.whole().flatten(0, 1)

    def apart(self, other: Any) -> Any:
        """Return another argument as it meets the inner tensor."""
        if isinstance(other, Joined):
            return other.with_heads
        if isinstance(other, Rows):
            raise MissingRows("it combines joined heads with others")
        if not isinstance(other, Tensor) or other.ndim < 3:
            return other
        if other.ndim > 3 or other.shape[0] not in (1, self.shape[0]):
            raise MissingRows("it adds sequences")
        return other[None] if other.shape[0] == 1 else other.unflatten(0, self.with_heads.shape[:2])


def joined(x: Rows, sizes: Sequence[int]) -> Joined:
    """Return a tensor of shape (batch, heads, ...) in the shape (batch * heads, ...)."""
    shape = list(x.shape)
    if len(shape) != 4 or completed(x, sizes) != [shape[0] * shape[1], *shape[2:]] or isinstance(x, Joined):
        raise MissingRows("it joins positions with features")
    if not isinstance(x, Scores) and (x.dims[0] >= 0 or x.dims[1] < 0):
        raise MissingRows("it joins positions with features")
    return Joined(x)


def _inside(func: Any, *args: Any, **kwargs: Any) -> Joined:
    """Apply the function to heads that are not joined."""
    x = next((arg for arg in args if isinstance(arg, Joined)), None)
    if x is None:
        raise MissingRows("it has the heads by name")
    inner = {name: x.apart(value) for name, value in kwargs.items()}
    return _again(type(x.with_heads).answers[func](func, *map(x.apart, args), **inner), x)


def _again(result: Any, x: Joined) -> Joined:
    """Return a result with heads of its own in the shape with joined heads."""
    if not isinstance(result, Rows) or result.shape[:2] != x.with_heads.shape[:2]:
        raise MissingRows("it returns joined heads otherwise")
    return Joined(result)


def _softmax(func: Any, x: Joined, dim: int, *args: Any, **kwargs: Any) -> Joined:
    if dim not in (-1, 2):
        raise MissingRows("it combines queries")
    return Joined(type(x.with_heads).answers[func](func, x.with_heads, -1, *args, **kwargs))


def _apart(func: Any, x: Joined, *sizes: Any) -> Rows:
    """``view`` and ``reshape``."""
    given = completed(x, sizes)
    if given not in (list(x.shape), list(x.with_heads.shape)):
        raise MissingRows("it joins positions with features")
    return x if given == list(x.shape) else x.with_heads


def _turned(func: Any, x: Joined, one: int = 1, two: int = 2) -> Joined:
    if isinstance(x.with_heads, Scores) or {one % 3, two % 3} != {1, 2}:
        raise MissingRows("it moves joined heads")
    return Joined(permute(x.with_heads, [0, 1, 3, 2]))


def _product(func: Any, one: Any, two: Any) -> Joined:
    return _again(product(one.with_heads, two.with_heads), one)


def _sum_and_product(func: Any, input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Joined:
    """``baddbmm``."""
    scores: Any = _product(func, batch1, batch2)
    if isinstance(input, Rows) or not beta:
        raise MissingRows("its arguments are of another kind")
    scores = scores if alpha == 1 else _inside(torch.mul, scores, alpha)
    return _inside(torch.add, scores, input if beta == 1 else input * beta)


def _join(func: Any, x: Rows, *sizes: Any) -> Joined:
    """``view`` and ``reshape`` of scores."""
    return joined(x, completed(x, sizes))


Joined.answers = {
    getter("mT"): _turned,
    **table(
        {
            _inside: (
                "float half bfloat16 double to contiguous clone detach dropout mul multiply div divide true_divide add "
                "masked_fill __mul__ __rmul__ __truediv__ __add__ __radd__"
            ),
            _softmax: "softmax",
            _apart: "view reshape",
            _turned: "transpose",
            _product: "bmm matmul __matmul__",
            _sum_and_product: "baddbmm",
        }
    ),
}
Scores.answers = {**Scores.answers, **table({_join: "view reshape"})}
