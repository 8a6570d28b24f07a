"""The rows of some positions of a padded batch, in the shape of the padded tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from torchboost.core.torch_private import is_view, tensor_without_memory, version
from torchboost.tokens.layout import Layout

BATCH, TOKEN, FLAT = -1, -2, -3
"""Dimensions of the padded shape that rows do not have: batch, length, and the two as one."""

RowFunction = Callable[[Tensor], Tensor]
"""Computes rows from rows, each from its own alone."""
Fill = float | bool | Callable[[], float | bool | None] | None
"""The value of missing positions, or a function that returns it. None if it is unknown."""


class MissingRows(BaseException):
    """A function needs positions that were not computed. The owners are who skipped positions of its arguments.

    They are told at once, because code of the user may catch this, or replace it by another exception.
    """

    def __init__(self, reason: str, owners: Collection[object] = ()) -> None:
        super().__init__(reason)
        self.owners = owners
        for owner in owners:
            ask = getattr(owner, "ask", None)
            if ask is not None:
                ask(reason)


class Memory:
    """The shared state of padded tensors that are views of each other, although their rows may lie apart.

    Attributes:
        outdated: Whether a tensor wrote to the memory and has left since. The others lack its values.
        copies: Tensors that would be views of the memory, and how often they had been written to.
        made: Tensors that a function outside of the model has made of the memory.
    """

    __slots__ = ("copies", "made", "outdated")

    def __init__(self) -> None:
        self.outdated = False
        self.copies: list[tuple[Tensor, int]] = []
        self.made: list[weakref.ref[Rows]] = []

    def copied(self, tensor: Tensor) -> None:
        """Note a tensor that would be a view of it."""
        self.copies.append((tensor, version(tensor)))

    @property
    def copy_written(self) -> bool:
        """Whether a copy was written to, which the rows lack."""
        return bool(self.copies) and any(version(copy) != then for copy, then in self.copies)


class Rows(Tensor):
    """The rows of some positions of a padded tensor. It has the shape of that tensor and no memory of its own.

    Args:
        base: Shape (rows, features...): every dimension except batch and length.
        positions: Where the rows belong.
        dims: For each dimension of the padded shape ``BATCH``, ``TOKEN``, ``FLAT``, or the number of a feature of
            ``base``, counted from 0.
        later: Computed on the rows before they are used, in this order.
        fill: The value of the missing positions.

    Attributes:
        memory: The state that the padded tensor shares with its views.
        needs_grad: Whether the rows are part of a graph.
        known: The padded tensor, if it was computed.
        node: Where the padded tensor stands in the graph of autograd, once it has left the model.
        source: Returns the whole padded tensor. None inside the pass, whose caller then runs it again on whole tensors.
    """

    base: Tensor
    positions: Layout
    dims: tuple[int, ...]
    later: tuple[RowFunction, ...]
    fill: Fill
    memory: Memory
    needs_grad: bool
    known: Tensor | None
    node: Any
    source: Callable[[], Tensor] | None

    def __new__(
        cls,
        base: Tensor,
        positions: Layout,
        dims: Sequence[int],
        later: tuple[RowFunction, ...] = (),
        fill: Fill = None,
    ) -> Rows:
        """Make a tensor without memory."""
        if not torch.is_grad_enabled():
            base = base.detach() if base.requires_grad else base
            later = tuple(map(_without_gradient, later))
        features = [dim for dim in dims if dim >= 0]
        if features != sorted(features):
            base, dims = base.permute(0, *(dim + 1 for dim in features)), numbered(dims)
        like = base[:0] if later else base
        for function in later:
            like = function(like)
        sizes = {BATCH: positions.batch, TOKEN: positions.length, FLAT: positions.batch * positions.length}
        shape = [sizes[dim] if dim < 0 else like.shape[dim + 1] for dim in dims]
        rows = cls.made(shape, like, base, positions)
        rows.dims, rows.later, rows.fill = tuple(dims), later, fill
        positions.note(rows)
        return rows

    @classmethod
    def made(cls, shape: Sequence[int], like: Tensor, base: Tensor, positions: Layout) -> Any:
        """Return a tensor without memory, in the precision of ``like``, and without dimensions of its rows."""
        if like.device != positions.mask.device:
            raise MissingRows("it moves to another device")
        rows: Any = tensor_without_memory(cls, shape, like)
        rows.base, rows.positions, rows.dims, rows.later, rows.fill = base, positions, (), (), None
        rows.needs_grad, rows.known, rows.node = like.requires_grad, None, None
        rows.source, rows.memory = None, Memory()
        return rows

    def like(self, *args: Any, **kwargs: Any) -> Self:
        """Return other rows of the same kind. Takes the arguments of the class."""
        kind: Any = type(self)
        return kind(*args, **kwargs)

    @property
    def rows(self) -> Tensor:
        """The rows, computed. Shape (rows, features...)."""
        if not self.later:
            return self.base
        with torch.set_grad_enabled(self.needs_grad):  # they are kept for functions that need a gradient
            rows = self._computed(self.base)
        if self.positions.forced is not None:
            self.positions.forced()
        self.base, self.later = rows, ()
        return rows

    def picked(self, index: Tensor) -> Tensor:
        """Return these rows. Later computations are done for them alone."""
        rows = self.base.index_select(0, index)
        with torch.set_grad_enabled(self.needs_grad and torch.is_grad_enabled()):
            return self._computed(rows)

    def empty(self) -> Tensor:
        """Return none of these rows, with their history."""
        return self._computed(self.base[:0])

    def _computed(self, rows: Tensor) -> Tensor:
        for function in self.later:
            rows = function(rows)
        return rows

    def of(self, rows: Tensor, dims: Sequence[int] | None = None, fill: Fill = None) -> Self:
        """Return other rows of the same positions."""
        other = self.like(rows, self.positions, self.dims if dims is None else dims, fill=fill)
        return other.sharing(self) if rows is self.base or is_view(rows) else other

    def then(self, function: RowFunction) -> Self:
        """Return the result of a function for each row, computed later if these rows are."""
        if self.later:
            function = in_this_precision(self.device.type, function)
            return self.like(self.base, self.positions, self.dims, (*self.later, function)).sharing(self)
        return self.of(function(self.base))

    def arranged(self, dims: Sequence[int]) -> Self:
        """Return the same rows in another padded shape."""
        return self.like(self.base, self.positions, dims, self.later, self.fill).sharing(self)

    def sharing(self, other: Rows) -> Self:
        """Return this tensor as a view of another one."""
        self.memory = other.memory
        return self

    def check(self) -> None:
        """Raise :class:`MissingRows` if a view of the padded tensor was written to, which these rows may lack."""
        if self.memory.outdated or self.memory.copy_written:
            raise MissingRows("a view of its argument was written to")

    def replace(self, other: Rows) -> Self:
        """Become another tensor, as a function does that writes to its argument. Views are not used any more."""
        if other.shape != self.shape:
            raise MissingRows("it writes another shape")
        if self.memory.copies:
            raise MissingRows("it writes to a tensor of which a part was taken")
        self.memory.outdated = True
        vars(self).update(vars(other if other.dtype is self.dtype else other.then(lambda rows: rows.to(self.dtype))))
        self.memory = Memory()
        return self

    @property
    def places(self) -> tuple[int, ...]:
        """The dimensions of the padded shape that are batch and length, or both as one."""
        both = BATCH in self.dims
        return (self.dims.index(BATCH), self.dims.index(TOKEN)) if both else (self.dims.index(FLAT),)

    def feature(self, dim: int) -> int:
        """Return the dimension of the rows for a dimension of the padded shape."""
        number = self.dims[dim]
        if number < 0:
            raise MissingRows("it combines positions")
        return number + 1

    def filled(self) -> float | bool | None:
        """Return the value of the missing positions, or None if it is unknown."""
        self.fill = known(self.fill)
        return self.fill

    def whole(self) -> Tensor:
        """Return the padded tensor."""
        positions, rows = self.positions, self.rows
        if not positions.complete:
            fill = self.filled()
            if fill is None:
                raise MissingRows("it needs the padding")
            padded = rows.new_full((positions.batch * positions.length, *rows.shape[1:]), fill)
            rows = padded.index_copy(0, positions.index, rows)
        if FLAT not in self.dims:
            rows = rows.unflatten(0, (positions.batch, positions.length))
        return rows.movedim(tuple(range(len(self.places))), self.places)

    def operand(self, other: Tensor) -> Tensor:
        """Return another tensor in the form that broadcasts with the rows of this one."""
        if isinstance(other, Rows):
            if other.positions is not self.positions or (other.ndim, other.places) != (self.ndim, self.places):
                raise MissingRows("it combines different positions")
            return other.rows
        added, places = self.ndim - other.ndim, self.places
        if added < 0:
            raise MissingRows("it adds dimensions")
        if added > max(places):
            return other  # it has features alone
        if any(place >= added and other.shape[place - added] not in (1, self.shape[place]) for place in places):
            raise MissingRows("it repeats positions")
        return self.positions.gathered(other, places, added)

    def if_absent(self, mask: Any, value: Any, filled: float | bool) -> Fill:
        """Return ``filled`` as the fill of the missing positions if a mask has the same value at all of them.

        The mask is read when the padding is needed. Unless it has an entry for each position, nothing is known. Nor if
        it has a gradient, which may come from the missing positions.
        """
        if not isinstance(mask, Tensor) or isinstance(mask, Rows) or mask.ndim != self.ndim:
            return None
        positions, places = self.positions, self.places
        if positions.complete or mask.requires_grad or any(mask.shape[place] != self.shape[place] for place in places):
            return None
        then = version(mask)

        def fill() -> float | bool | None:
            if version(mask) != then:
                return None
            entries = mask.detach().movedim(places, tuple(range(len(places))))
            entries = entries.flatten(0, len(places) - 1).index_select(0, positions.absent)
            return filled if bool((entries == value).all()) else None

        return fill


def known(fill: Fill) -> float | bool | None:
    """Return the value of a fill."""
    return fill() if callable(fill) else fill


def _without_gradient(function: RowFunction) -> RowFunction:
    def compute(rows: Tensor) -> Tensor:
        with torch.no_grad():
            return function(rows)

    return compute


def numbered(dims: Sequence[int]) -> tuple[int, ...]:
    """Number the features of a padded shape in their order."""
    count, numbers = 0, []
    for dim in dims:
        numbers.append(dim if dim < 0 else count)
        count += dim >= 0
    return tuple(numbers)


def in_this_precision(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes with the present autocast settings of a kind of device, whenever it is called."""
    options: dict[str, Any] = {"dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}

    def compute(*args: Any) -> Any:
        with torch.autocast(kind, **options):
            return function(*args)

    return compute
