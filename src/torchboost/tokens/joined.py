"""Heads that are joined with the batch, as ``torch.bmm`` takes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchboost.core.torch_private import tensor_without_memory
from torchboost.tokens.answers import Answer, Answering, first, functions, getter
from torchboost.tokens.rows import MissingRows, Rows
from torchboost.tokens.scores import Scores, product
from torchboost.tokens.shapes import permute

__all__ = ["Joined", "joined"]


class Joined(Answering):
    """Rows or scores of padded sequences in the shape (batch * heads, ...).

    Args:
        with_heads: The same in the shape (batch, heads, ...).
    """

    precedence: ClassVar[int] = 2
    with_heads: Answering

    def __new__(cls, with_heads: Any) -> Joined:
        """Make a tensor without memory."""
        batch, heads, *rest = with_heads.shape
        one: Any = tensor_without_memory(cls, (batch * heads, *rest), with_heads)
        one.with_heads, one.base, one.positions = with_heads, with_heads.base, with_heads.positions
        one.dims, one.later, one.fill = (), (), None
        one.needs_grad, one.source, one.memory = with_heads.needs_grad, None, with_heads.memory
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
    rest = math.prod(size for size in sizes if size != -1)
    sizes = [math.prod(x.shape) // max(rest, 1) if size == -1 else size for size in sizes]
    shape = list(x.shape)
    if len(shape) != 4 or sizes != [shape[0] * shape[1], *shape[2:]] or isinstance(x, Joined):
        raise MissingRows("it joins positions with features")
    if not isinstance(x, Scores) and (x.dims[0] >= 0 or x.dims[1] < 0):
        raise MissingRows("it joins positions with features")
    return Joined(x)


def _inside(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function does with heads that are not joined."""
    x = next(arg for arg in args if isinstance(arg, Joined))
    args = tuple(map(x.apart, args))
    kwargs = {name: x.apart(value) for name, value in kwargs.items()}
    result = type(x.with_heads).answers[func](func, args, kwargs)
    return Joined(result) if isinstance(result, Rows) and result.shape[:2] == x.with_heads.shape[:2] else _refused()


def _refused() -> Any:
    raise MissingRows("it returns joined heads otherwise")


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rest = first(args), list(args[1:])
    named = dict(kwargs)
    if (rest.pop(0) if rest else named.pop("dim")) not in (-1, 2):
        raise MissingRows("it combines queries")
    return Joined(type(x.with_heads).answers[func](func, (x.with_heads, -1, *rest), named))


def _apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``view`` and ``reshape``."""
    x = first(args)
    sizes = list(args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:])
    rest = math.prod(size for size in sizes if size != -1)
    sizes = [math.prod(x.shape) // max(rest, 1) if size == -1 else size for size in sizes]
    if sizes == list(x.shape):
        return x
    if sizes != list(x.with_heads.shape):
        raise MissingRows("it joins positions with features")
    return x.with_heads


def _turned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, order = first(args), [0, 1, 2]
    if kwargs or isinstance(x.with_heads, Scores):
        raise MissingRows("it turns scores")
    if len(args) == 3:  # transpose
        order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
    elif len(args) != 1:
        raise MissingRows("it turns scores")
    if len(args) == 3 and order != [0, 2, 1]:
        raise MissingRows("it moves joined heads")
    return Joined(permute(x.with_heads, [0, 1, 3, 2]))


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    one, two = args
    if not isinstance(one, Joined) or not isinstance(two, Joined):
        raise MissingRows("it multiplies padded tensors")
    result = product(one.with_heads, two.with_heads)
    return Joined(result) if isinstance(result, Rows) else _refused()


def _sum_and_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``baddbmm``."""
    names = ("input", "batch1", "batch2")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    scores: Any = _product(torch.bmm, (given.pop("batch1"), given.pop("batch2")), {})
    term, beta, alpha = given.pop("input"), given.pop("beta", 1), given.pop("alpha", 1)
    if given or not isinstance(scores.with_heads, Scores) or isinstance(term, Rows) or not beta:
        raise MissingRows("its arguments are of another kind")
    inner = scores.with_heads
    inner = inner if alpha == 1 else Scores.answers[torch.mul](torch.mul, (inner, alpha), {})
    term = scores.apart(term if beta == 1 else term * beta)
    return Joined(Scores.answers[torch.add](torch.add, (inner, term), {}))


def _needs_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return first(args).needs_grad


def _join(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``view`` and ``reshape`` of scores."""
    sizes = list(args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:])
    return joined(first(args), sizes)


_NAMES: Mapping[Answer, str] = {
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
Joined.answers = {
    getter("requires_grad"): _needs_grad,
    getter("mT"): _turned,
    **{function: answer for answer, names in _NAMES.items() for function in functions(*names.split())},
}
Scores.answers = {**Scores.answers, **dict.fromkeys(functions("view", "reshape"), _join)}
