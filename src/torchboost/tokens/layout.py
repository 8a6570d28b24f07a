"""The positions of a padded batch that are computed, and where their rows lie."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchboost.core.torch_private import Packed, version


class Layout:
    """The computed positions of a batch of sequences: where ``mask`` is true, of shape (batch, length).

    ``owner`` is who skipped the other positions. ``forced`` is called if rows that wait to be computed all are.
    """

    def __init__(self, mask: Tensor, owner: object = None, forced: Callable[[], None] | None = None) -> None:
        self.mask, self.owner, self.forced = mask, owner, forced
        self.batch, self.length = mask.shape
        self.on_host = mask.cpu()
        """The mask on the host. A read of the device in the middle of a model waits for all work before it."""
        self.index = mask.flatten().nonzero().squeeze(1)
        self._results: dict[tuple[int, Any], tuple[Tensor, int, Any]] = {}
        self._crops: dict[tuple[int, int], tuple[Layout, Tensor]] = {}

    @property
    def complete(self) -> bool:
        """Whether every position is computed."""
        return self.index.numel() == self.batch * self.length

    @cached_property
    def sequences(self) -> Tensor:
        """The sequence of each row."""
        return self.index.div(self.length, rounding_mode="floor")

    @cached_property
    def tokens(self) -> Tensor:
        """The position of each row in its sequence."""
        return self.index.remainder(self.length)

    @cached_property
    def lengths(self) -> list[int]:
        """The number of rows of each sequence."""
        return self.on_host.sum(1).tolist()

    @cached_property
    def packed(self) -> Packed:
        """The places of the rows of sequences that lie one after the other."""
        return Packed(F.pad(self.mask.sum(1).cumsum(0), (1, 0)).int(), max(self.lengths, default=0))

    @cached_property
    def begins_with_rows(self) -> bool:
        """Whether every sequence has its padding at the end."""
        return not bool((self.on_host[:, 1:] & ~self.on_host[:, :-1]).any())

    @cached_property
    def row_of(self) -> Tensor:
        """The row of each position, -1 without one. Shape (batch, length)."""
        rows = torch.full((self.batch * self.length,), -1, dtype=torch.long, device=self.mask.device)
        rows[self.index] = torch.arange(self.index.numel(), device=self.mask.device)
        return rows.view(self.batch, self.length)

    @cached_property
    def absent(self) -> Tensor:
        """The positions without a row, counted over the whole batch."""
        return (~self.mask).flatten().nonzero().squeeze(1)

    def note(self, tensor: Tensor) -> None:
        """Tell the owner of a tensor that has rows of this layout, if it wants to know."""
        note = getattr(self.owner, "note", None)
        if note is not None:
            note(tensor)

    def crop(self, start: int, stop: int) -> tuple[Layout, Tensor]:
        """Return the layout of the positions from ``start`` to ``stop`` of each sequence, and which rows it has."""
        if (start, stop) not in self._crops:
            rows = ((self.tokens >= start) & (self.tokens < stop)).nonzero().squeeze(1)
            self._crops[start, stop] = Layout(self.mask[:, start:stop], self.owner, self.forced), rows
        return self._crops[start, stop]

    def gathered(self, tensor: Tensor, places: tuple[int, ...], added: int = 0) -> Tensor:
        """Return the rows of a tensor that broadcasts with a padded one, after ``added`` dimensions of size 1.

        Its dimensions at ``places``, batch and length or the two as one, have the size of the padded tensor, or 1.
        """
        moved = tensor[(None,) * added].movedim(places, tuple(range(len(places))))
        if tensor.requires_grad:
            return self._taken(moved, len(places))
        return self.once(tensor, lambda: self._taken(moved, len(places)), (places, added))

    def _taken(self, moved: Tensor, count: int) -> Tensor:
        """Return the rows of a tensor that begins with batch and length, or with the two as one."""
        if count == 1:
            return moved if moved.shape[0] == 1 else moved.index_select(0, self.index)
        if moved.shape[:2] == (1, 1):
            return moved[0]
        if moved.shape[0] == 1:
            return moved[0].index_select(0, self.tokens)
        if moved.shape[1] == 1:
            return moved[:, 0].index_select(0, self.sequences)
        return moved.flatten(0, 1).index_select(0, self.index)

    def once(self, tensor: Tensor, compute: Callable[[], Any], kind: Any = None) -> Any:
        """Return the result of its kind that is computed from a tensor alone, again only if it has been written to."""
        key = id(tensor), kind
        source, then, result = self._results.get(key, (None, 0, None))
        if source is not tensor or then != version(tensor):
            result = compute()
            self._results[key] = tensor, version(tensor), result
        return result

    @cached_property
    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The positions of each sequence that are computed, and the other positions."""
        present = self.tokens.split(self.lengths)
        absent = self.absent.remainder(self.length).split([self.length - length for length in self.lengths])
        return list(zip(present, absent, strict=True))
