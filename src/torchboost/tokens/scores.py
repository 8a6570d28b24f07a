"""Attention by hand: products of padded tensors, kept for each sequence by itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchboost.core.torch_private import tensor_without_memory, version
from torchboost.tokens.answers import Answer, Answering, first, functions, getter
from torchboost.tokens.einsum import einsum_of_scores
from torchboost.tokens.layout import Layout
from torchboost.tokens.rows import BATCH, TOKEN, Memory, MissingRows, Rows, numbered

__all__ = ["EXCLUDED", "Scores", "product", "sequences"]

EXCLUDED = -9e3
"""A smaller entry of a mask that is added, next to scores of usual size, gives a weight of exactly 0."""
_STILL_EXCLUDED = -1e3
"""What of it must remain at the softmax, as the exponential of -746 is 0."""

Mask = tuple[Tensor, str]
"""A mask, and which of its entries exclude a key: "true", "false" or "less" than :data:`EXCLUDED`."""


class Scores(Answering):
    """A score for each query and key of padded sequences. Shape (batch, heads..., queries, keys).

    A function may combine all keys of a query only if those that are missing do not count.

    Args:
        blocks: The scores of each sequence. Shape (heads..., queries, keys).
        queries: Which queries the blocks have; None for all.
        keys: Which keys the blocks have; None for all.
        kind: Class of the averages.
        most: All missing keys are known to have smaller or the same scores; None if nothing is known.
        zero: Whether the missing keys have 0.
        masks: What excluded keys.
    """

    precedence: ClassVar[int] = 1
    blocks: list[Tensor]
    queries: Layout | None
    keys: Layout | None
    kind: type[Rows]
    most: float | None
    zero: bool
    masks: tuple[Mask, ...]

    def __new__(
        cls,
        blocks: Sequence[Tensor],
        queries: Layout | None,
        keys: Layout | None,
        kind: type[Rows],
        *,
        most: float | None = None,
        zero: bool = False,
        masks: tuple[Mask, ...] = (),
    ) -> Scores:
        """Make a tensor without memory."""
        one, positions = blocks[0], keys or queries
        if positions is None or one.device != positions.mask.device:
            raise MissingRows("it moves to another device")
        shape = list(one.shape)
        for place, layout in ((-2, queries), (-1, keys)):
            shape[place] = shape[place] if layout is None else layout.length
        scores: Any = tensor_without_memory(cls, (len(blocks), *shape), one)
        scores.blocks, scores.queries, scores.keys, scores.kind = list(blocks), queries, keys, kind
        scores.most, scores.zero, scores.masks = most, zero, masks
        scores.needs_grad, scores.source, scores.memory = any(block.requires_grad for block in blocks), None, Memory()
        scores.known = scores.node = None
        scores.base, scores.positions, scores.dims, scores.later, scores.fill = one, positions, (), (), None
        return scores

    def whole(self) -> Tensor:
        """Raise :class:`MissingRows`: the padding has scores as well."""
        raise MissingRows("it needs the scores of padding")

    def each(self, function: Callable[..., Tensor], *parts: Sequence[Any], **state: Any) -> Scores:
        """Return what a function makes of the block of each sequence, and of its entry of other lists."""
        blocks = [function(*values) for values in zip(self.blocks, *parts, strict=True)]
        scores = Scores(blocks, self.queries, self.keys, self.kind, **{"masks": self.masks, **state})
        if scores.ndim != self.ndim or scores.shape[-2:] != self.shape[-2:]:
            raise MissingRows("it adds dimensions")
        scores.memory = self.memory  # it may be the same tensor or a view
        return scores

    @property
    def state(self) -> dict[str, Any]:
        """What is known of the missing keys."""
        return {"most": self.most, "zero": self.zero, "masks": self.masks}

    def parts(self, other: Tensor) -> list[Tensor]:
        """Return what meets the block of each sequence of a tensor that broadcasts with the padded scores."""
        if isinstance(other, Rows) or other.ndim > self.ndim:
            raise MissingRows("it combines scores with other positions")
        sizes = (1,) * (self.ndim - other.ndim) + tuple(other.shape)
        if any(sizes[place] not in (1, self.shape[place]) for place in (0, -2, -1)):
            raise MissingRows("it adds sequences")
        if other.requires_grad:
            return self._parts(other)
        return self.positions.once(other, lambda: self._parts(other), ("parts", self.ndim, self.queries, self.keys))

    def _parts(self, other: Tensor) -> list[Tensor]:
        return [self._at(other, index, sequence) for sequence, index in enumerate(_present(self.keys, self.shape[0]))]

    def _at(self, other: Tensor, keys: Tensor | None, sequence: int) -> Tensor:
        """Return the entries of one sequence for its queries and some keys."""
        other = other[(None,) * (self.ndim - other.ndim)]
        part = other[0 if other.shape[0] == 1 else sequence]
        if self.queries is not None and part.shape[-2] > 1:
            part = part.index_select(-2, self.queries.parts[sequence][0])
        return part if keys is None or part.shape[-1] == 1 else part.index_select(-1, keys)

    def missing(self, other: Tensor) -> tuple[float, float]:
        """Return the smallest and the largest entry of a tensor for the missing keys of the queries."""
        keys = self.keys
        if keys is None or keys.complete:
            return math.inf, -math.inf
        return self.positions.once(other, lambda: self._missing(other, keys), ("missing", self.queries, keys))

    @torch.no_grad()
    def _missing(self, other: Tensor, keys: Layout) -> tuple[float, float]:
        parts = [self._at(other, absent, sequence) for sequence, (_, absent) in enumerate(keys.parts) if len(absent)]
        ends = [(part.amin(), part.amax()) for part in parts if part.numel()]
        if not ends:
            return math.inf, -math.inf
        least, most = torch.stack([one for one, _ in ends]).amin(), torch.stack([one for _, one in ends]).amax()
        return tuple(torch.stack([least, most]).tolist())

    def excluded(self, mask: Mask, value: float) -> dict[str, Any]:
        """Return what is known of the missing keys after a mask has given them a value, or added it."""
        masks = (*self.masks, mask)
        tensor, kind = mask
        least, most = self.missing(tensor)
        if kind == "less":  # added
            hidden = most if most < EXCLUDED else None
            if self.most is not None and (hidden is not None or most < -EXCLUDED):
                hidden = self.most + max(0.0, most)
            return {"most": hidden, "masks": masks}
        replaced = least == 1 if kind == "true" else most == 0
        if self.keys is None or self.keys.complete:
            replaced = True
        zero = value == 0 and (replaced or self.zero)
        if value >= EXCLUDED:
            return {"most": None, "zero": zero, "masks": self.masks}
        most_now = value if replaced else None if self.most is None else max(self.most, value)
        return {"most": most_now, "masks": masks}

    def check_softmax(self) -> None:
        """Raise :class:`MissingRows` if missing keys get a weight."""
        if self.keys is None or self.keys.complete:
            return
        if self.most is None or self.most > _STILL_EXCLUDED:
            raise MissingRows("attention sees the padding")
        head = self.masks[0][0]
        kind = tuple((id(mask), version(mask), how) for mask, how in self.masks)
        blind, _ = self.positions.once(head, lambda: (self._is_blind(), self.masks), ("blind", kind))
        if blind:
            raise MissingRows("a query sees nothing")

    @torch.no_grad()
    def _is_blind(self) -> bool:
        """Whether the masks leave a query no key."""
        parts = [(self.parts(mask), how) for mask, how in self.masks]
        blind = []
        for sequence in range(len(self.blocks)):
            out = [_excludes(part[sequence], how) for part, how in parts]
            blind.append(functools.reduce(torch.logical_or, out).all(-1).any())
        return bool(torch.stack(blind).any())

    def replace(self, other: Scores) -> Scores:
        """Become other scores, as a function does that writes to its argument."""
        if other.shape != self.shape:
            raise MissingRows("it writes another shape")
        self.write()
        if other.dtype != self.dtype:
            other = Scores(
                [block.to(self.dtype) for block in other.blocks], other.queries, other.keys, other.kind, **other.state
            )
        self.blocks, self.most, self.zero, self.masks = other.blocks, other.most, other.zero, other.masks
        self.base, self.needs_grad = other.base, other.needs_grad
        return self


def _excludes(mask: Tensor, how: str) -> Tensor:
    return mask < EXCLUDED if how == "less" else mask.bool() if how == "true" else ~mask.bool()


def _present(layout: Layout | None, batch: int) -> list[Tensor | None]:
    return [None] * batch if layout is None else [present for present, _ in layout.parts]


def product(one: Tensor, two: Tensor) -> Tensor:
    """Return the matrix product of two tensors of which at least one has rows: scores, or averages by weights."""
    if isinstance(one, Scores):
        return _averages(one, two)
    if isinstance(two, Scores) or one.ndim != two.ndim or one.ndim < 3 or one.shape[0] != two.shape[0]:
        raise MissingRows("it multiplies padded tensors")
    queries = sequences(one, -2)
    keys = sequences(two, -1)
    if queries is None or keys is None:
        raise MissingRows("it multiplies padded tensors")
    layouts = [part.positions if isinstance(part, Rows) else None for part in (one, two)]
    kind: Any = type(one if isinstance(one, Rows) else two)
    return Scores([torch.matmul(q, k) for q, k in zip(queries, keys, strict=True)], layouts[0], layouts[1], kind)


def sequences(x: Tensor, token: int) -> Sequence[Tensor] | None:
    """Return each sequence by itself, without its padding, in the order of its dimensions."""
    if not isinstance(x, Rows):
        return x.unbind(0)
    if x.dims[0] != BATCH or x.dims[token] != TOKEN:
        return None
    place = token if token == -1 else x.ndim - 3
    return [part.movedim(0, place) for part in x.rows.split(x.positions.lengths)]


def _averages(weights: Scores, values: Tensor) -> Tensor:
    """Return the averages of values of each query."""
    if isinstance(values, Scores) or values.ndim != weights.ndim or values.shape[0] != weights.shape[0]:
        raise MissingRows("it multiplies scores")
    positions = values.positions if isinstance(values, Rows) else None
    if positions is not weights.keys or not (weights.zero or positions is None):
        raise MissingRows("the padding has weights")
    parts = sequences(values, -2)
    if parts is None:
        raise MissingRows("it multiplies positions otherwise")
    outputs = [torch.matmul(block, part) for block, part in zip(weights.blocks, parts, strict=True)]
    if weights.queries is None:
        return torch.stack(outputs)
    rows = torch.cat([output.movedim(-2, 0) for output in outputs])
    return weights.kind(rows, weights.queries, numbered((BATCH, *[0] * (rows.ndim - 2), TOKEN, 0)))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers, maybe in another precision."""
    x, rest = first(args), args[1:]
    result = x.each(lambda block: func(block, *rest, **kwargs), **x.state)
    if not result.is_floating_point():
        raise MissingRows("it makes integers")
    return result


def _alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each entry by itself."""
    x, rest = first(args), args[1:]
    if kwargs.get("inplace") or any(isinstance(arg, Tensor) for arg in (*rest, *kwargs.values())):
        raise MissingRows("its arguments are of another kind")
    return x.each(lambda block: func(block, *rest, **kwargs))


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, rest = first(args), args[1:]
    named = {name: value for name, value in kwargs.items() if name != "inplace"}
    result = x.each(lambda block: func(block, *rest, **named), zero=x.zero)
    return x.replace(result) if kwargs.get("inplace") else result


def _sides(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Scores, Any, Callable[..., Tensor]]:
    """Return the scores, the other argument, and the function with the scores first."""
    one, two = args
    if isinstance(one, Scores) is isinstance(two, Scores):
        raise MissingRows("it combines scores")
    if isinstance(one, Scores):
        return one, two, lambda block, other: func(block, other, **kwargs)
    return two, one, lambda block, other: func(other, block, **kwargs)


def _scaled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Products and quotients."""
    x, factor, compute = _sides(func, args, kwargs)
    if func in _QUOTIENTS and x is not args[0]:
        raise MissingRows("it divides by scores")
    if isinstance(factor, Tensor) and factor.ndim:
        zero = x.zero or (func not in _QUOTIENTS and factor.shape[-1] > 1 and x.missing(factor) == (0, 0))
        return x.each(compute, x.parts(factor), zero=zero)
    size = float(factor) if _is_number(factor) else 0.0
    size = 1 / size if size and func in _QUOTIENTS else size
    most = x.most * size if x.most is not None and size > 0 else None
    return x.each(lambda block: compute(block, factor), most=most, zero=x.zero)


def _raised(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The larger one of each score and a number."""
    x, other, compute = _sides(func, args, kwargs)
    least = _value(other)
    most = None if x.most is None else max(x.most, least)
    return x.each(lambda block: compute(block, other), most=most, zero=x.zero and least <= 0)


def _added(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums and differences."""
    x, other, compute = _sides(func, args, kwargs)
    if not isinstance(other, Tensor) or not other.ndim:
        return x.each(lambda block: compute(block, other))
    parts = x.parts(other)
    is_sum = func in _SUMS and not kwargs and other.is_floating_point()
    return x.each(compute, parts, **(x.excluded((other, "less"), 0) if is_sum else {}))


def _value(value: Any) -> float:
    if isinstance(value, Tensor) and not isinstance(value, Rows) and not value.ndim:
        return float(value.item())
    if not _is_number(value):
        raise MissingRows("its value is of another kind")
    return float(value)


def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    mask, value = (*args[1:], *kwargs.values())
    return x.each(
        lambda block, part: block.masked_fill(part, value), x.parts(mask), **x.excluded((mask, "true"), _value(value))
    )


def _where(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask, one, two = args
    if isinstance(mask, Rows) or mask.dtype is not torch.bool or isinstance(one, Scores) is isinstance(two, Scores):
        raise MissingRows("its arguments are of another kind")
    parts = (one if isinstance(one, Scores) else two).parts(mask)
    if isinstance(one, Scores):
        state = one.excluded((mask, "false"), _value(two))
        return one.each(lambda block, part: torch.where(part, block, two), parts, **state)
    state = two.excluded((mask, "true"), _value(one))
    return two.each(lambda block, part: torch.where(part, one, block), parts, **state)


def _softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = first(args)
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if dim not in (-1, x.ndim - 1):
        raise MissingRows("it combines queries")
    x.check_softmax()
    rest, named = args[2:], {name: value for name, value in kwargs.items() if name != "dim"}
    return x.each(lambda block: func(block, -1, *rest, **named), zero=True, masks=())


def _of_heads(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Average or sum of the heads."""
    x: Scores = first(args)
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    place = range(x.ndim)[dim]
    if len(args) > 2 or set(kwargs) - {"dim"} or not 0 < place < x.ndim - 2:
        raise MissingRows("it combines positions")
    blocks = [func(block, place - 1) for block in x.blocks]
    return x.like(blocks, x.queries, x.keys, x.kind, zero=x.zero)


def _product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return product(*args, **kwargs)


def _einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return einsum_of_scores(product, *args, **kwargs)


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index = args
    parts = index if isinstance(index, tuple) else (index,)
    if any(not isinstance(part, slice) for part in parts) or len(parts) > x.ndim:
        raise MissingRows("it takes some of the scores")
    if any(part.indices(size) != (0, size, 1) for part, size in zip(parts, x.shape, strict=False)):
        raise MissingRows("it takes some of the scores")
    return x


def _needs_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return first(args).needs_grad


def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, other = args
    if not isinstance(x, Scores):
        return x.to(other.device, other.dtype)
    return _same(torch.Tensor.to, (x, other.dtype), {})


def _expand_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask, x = args
    if isinstance(mask, Rows):
        raise MissingRows("it repeats positions")
    return mask.expand(x.shape)


def _in_place(answer: Answer, plain: Any) -> Answer:
    def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return first(args).replace(answer(plain, args, kwargs))

    return compute


_QUOTIENTS = frozenset(functions("div", "true_divide", "divide", "__truediv__"))
_SUMS = frozenset(functions("add", "__add__", "__radd__"))
_NAMES: Mapping[Answer, str] = {
    _same: "float half bfloat16 double to contiguous clone detach",
    _alone: "tanh sigmoid exp abs neg relu gelu silu square",
    _dropout: "dropout",
    _scaled: "mul multiply div divide true_divide __mul__ __rmul__ __truediv__",
    _added: "add sub subtract __add__ __radd__ __sub__",
    _raised: "maximum max",
    _masked_fill: "masked_fill",
    _where: "where",
    _softmax: "softmax",
    _of_heads: "mean sum",
    _product: "matmul __matmul__ bmm",
    _einsum: "einsum",
    _getitem: "__getitem__",
    _type_as: "type_as",
    _expand_as: "expand_as",
}
_IN_PLACE: Mapping[str, tuple[Answer, Any]] = {
    "mul_ __imul__": (_scaled, torch.mul),
    "div_ __itruediv__": (_scaled, torch.div),
    "add_ __iadd__": (_added, torch.add),
    "sub_ __isub__": (_added, torch.sub),
    "masked_fill_": (_masked_fill, torch.masked_fill),
}
Scores.answers = {
    getter("requires_grad"): _needs_grad,
    **{function: answer for answer, names in _NAMES.items() for function in functions(*names.split())},
    **{function: _in_place(*how) for names, how in _IN_PLACE.items() for function in functions(*names.split())},
}
