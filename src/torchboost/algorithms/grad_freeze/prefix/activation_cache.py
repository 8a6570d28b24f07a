"""A cache of rows of tensors by sample id, in memory or in a memory-mapped file, with a fixed budget."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from torchboost.errors import CacheSpaceWarning

__all__ = ["ActivationCache", "sample_ids"]

_FIRST_CHUNK = 16 * 2**20
_LARGEST_CHUNK = 256 * 2**20
_RECENT = 8192


def sample_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Return sample ids as a one-dimensional int64 tensor on the CPU.

    Args:
        ids: One integer per sample, at least 0; shape ``(n,)``.

    Raises:
        TypeError: The ids are not integers.
        ValueError: Not one-dimensional, or one is negative.
    """
    found = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    if found.numel() == 0:
        found = found.long()
    if found.dtype in (torch.bool, torch.uint64) or found.is_floating_point() or found.is_complex():
        raise TypeError(f"sample ids: found {found.dtype}; pass the integer index of each sample.")
    if found.ndim != 1:
        raise ValueError(f"sample ids: found shape {tuple(found.shape)}; expected one id per sample, shape (n,).")
    found = found.to("cpu", torch.int64)
    if found.numel() and int(found.min()) < 0:
        raise ValueError(f"sample ids: found {int(found.min())}; expected ids of 0 or more.")
    return found


class _Index:
    """Id -> slot, by binary search in two sorted lists: a long one, and a short one for recent ids."""

    def __init__(self) -> None:
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        self._old = self._recent = (empty, empty)

    def find(self, ids: Tensor) -> Tensor:
        slots = torch.full_like(ids, -1)
        for known, places in (self._old, self._recent):
            if known.numel():
                at = torch.searchsorted(known, ids).clamp_(max=known.numel() - 1)
                slots = torch.where(known[at] == ids, places[at], slots)
        return slots

    def add(self, ids: Tensor, slots: Tensor) -> None:
        self._recent = self._merged(self._recent, (ids, slots))
        if self._recent[0].numel() > _RECENT:
            self._old = self._merged(self._old, self._recent)
            self._recent = (ids[:0], slots[:0])

    @staticmethod
    def _merged(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, order = torch.cat([a[0], b[0]]).sort()
        return ids, torch.cat([a[1], b[1]])[order]


@dataclass(frozen=True, slots=True)
class _Column:
    """The layout of one of the tensors in a row.

    Args:
        shape: Shape of a sample, as it is returned.
        order: Dimensions of a batch in memory order, the batch first; this preserves channels-last.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> _Column:
        order = sorted(range(1, value.ndim), key=lambda d: (-value.stride(d), d))
        return cls(tuple(value.shape[1:]), (0, *order), value.dtype, value.device)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def holds(self, value: Tensor) -> bool:
        return (tuple(value.shape[1:]), value.dtype, value.device) == (self.shape, self.dtype, self.device)

    def to_bytes(self, value: Tensor) -> Tensor:
        flat = value.detach().cpu().permute(self.order).contiguous().reshape(len(value), math.prod(self.shape))
        return flat.view(torch.uint8)

    def from_bytes(self, rows: Tensor) -> Tensor:
        dense = rows.flatten().view(self.dtype).view(len(rows), *(self.shape[d - 1] for d in self.order[1:]))
        back = [self.order.index(d) for d in range(len(self.order))]
        return dense.permute(back).to(self.device)


@dataclass(slots=True)
class _Chunk:
    """Consecutive slots: one matrix of bytes per tensor of the row."""

    first: int
    rows: int
    columns: list[Tensor] = field(default_factory=list)


class ActivationCache:
    """Caches what a network computed for a sample.

    A row is a tuple of tensors of one sample: one index of dimension 0 of a batch. Rows are kept in order of arrival
    until ``budget_bytes`` are used; none is evicted. Looking up a batch is a binary search; reading returns copies,
    which may be written to.

    With ``path``, rows are stored in a memory-mapped file that the operating system pages in and out. Its space is
    reserved in chunks before use. If the disk is full, the cache warns and keeps no more rows; existing rows stay
    valid.

    Cost: memory or disk up to the budget, 16 bytes per row for the index, and one copy per row in and out. Limits: all
    rows have the shapes of the first ones; ids that are already kept are not overwritten.

    Args:
        budget_bytes: Maximum number of bytes for rows.
        path: Existing directory for the file, which is created with the first row and removed by :meth:`close`;
            None keeps rows in memory.

    Attributes:
        hits: Samples found since the last :meth:`clear`.
        misses: Samples not found since then.

    Raises:
        ValueError: The budget is below 1 byte, or ``path`` is not a directory.

    Example:
        >>> import torch
        >>> cache = ActivationCache(2**20)
        >>> cache.store([7, 3], (torch.tensor([[1.0], [2.0]]),))
        2
        >>> cache.read(cache.find([3]))
        (tensor([[2.]]),)
    """

    def __init__(self, budget_bytes: int, *, path: str | os.PathLike[str] | None = None) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes: found {budget_bytes}; pass the maximum number of bytes, 1 or more.")
        if path is not None and not os.path.isdir(path):
            raise ValueError(
                f"path: found {os.fspath(path)!r}, which is not a directory; create it, or pass another path."
            )
        self.budget_bytes = int(budget_bytes)
        self.path = None if path is None else Path(path)
        self.hits = self.misses = 0
        self._file: _File | None = None
        self._stopped = False
        self._forget()

    def _forget(self) -> None:
        self.rows = 0
        self._index = _Index()
        self._columns: tuple[_Column, ...] = ()
        self._chunks: list[_Chunk] = []

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; 0 before the first."""
        return sum(column.bytes for column in self._columns)

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def full(self) -> bool:
        """Whether the cache is full or off."""
        return self._stopped or (bool(self._columns) and self.rows >= self._capacity)

    @property
    def _capacity(self) -> int:
        return self.budget_bytes // max(self.row_bytes, 1)

    def find(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Return the slot of every sample, -1 if it is not kept; int64 of shape ``(n,)``. Counts hits.

        Raises:
            TypeError: ``ids`` are not integers.
            ValueError: ``ids`` are not one-dimensional, or one is negative.
        """
        slots = self._index.find(sample_ids(ids))
        found = int((slots >= 0).sum())
        self.hits += found
        self.misses += slots.numel() - found
        return slots

    def read(self, slots: Tensor, missing: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return copies of the rows in the given slots, of shape ``(len(slots), ...)``, on their original device.

        Args:
            slots: From :meth:`find`, shape ``(n,)``.
            missing: The rows for slots of -1, in their order: tensors that :meth:`fits`, of shape ``(m, ...)``.

        Raises:
            IndexError: A slot holds no row and ``missing`` has none for it.
        """
        least = -1 if missing else 0
        if slots.numel() and not least <= int(slots.min()) <= int(slots.max()) < self.rows:
            raise IndexError(
                f"slots: found {int(slots.min())} to {int(slots.max())}; rows lie in 0 to {self.rows - 1}."
            )
        firsts = torch.tensor([chunk.first for chunk in self._chunks], dtype=torch.int64, device="cpu")
        owner = torch.bucketize(slots, firsts, right=True) - 1
        masks = [(number, owner == number) for number in owner.unique().tolist()]
        result = []
        for place, column in enumerate(self._columns):
            rows = torch.empty(slots.numel(), column.bytes, dtype=torch.uint8, device="cpu")
            for number, mask in masks:
                if number < 0:
                    rows[mask] = column.to_bytes(missing[place])
                    continue
                chunk = self._chunks[number]
                if len(masks) == 1:
                    torch.index_select(chunk.columns[place], 0, slots - chunk.first, out=rows)
                else:
                    rows[mask] = chunk.columns[place].index_select(0, slots[mask] - chunk.first)
            result.append(column.from_bytes(rows))
        return tuple(result)

    def fits(self, values: Sequence[Tensor]) -> bool:
        """Whether tensors match the rows held in shape per sample, dtype and device; true if the cache is empty."""
        if not self._columns:
            return True
        return len(values) == len(self._columns) and all(c.holds(v) for c, v in zip(self._columns, values, strict=True))

    def store(self, ids: Tensor | Sequence[int], values: Sequence[Tensor]) -> int:
        """Store rows that are not kept yet, if there is room.

        Args:
            ids: One per sample, shape ``(n,)``.
            values: Tensors of shape ``(n, ...)``; only ``n`` may differ between calls.

        Returns:
            The number of rows that were added.

        Raises:
            TypeError: ``ids`` are not integers.
            ValueError: Lengths or shapes do not fit, or an id is negative.
        """
        wanted = sample_ids(ids)
        lengths = [len(value) if value.ndim else None for value in values]
        if not values or any(length != wanted.numel() for length in lengths):
            raise ValueError(f"values: found {wanted.numel()} ids and lengths {lengths}; expected one row per id.")
        if not self.fits(values):
            raise ValueError(
                f"values: found {[(tuple(v.shape[1:]), v.dtype, str(v.device)) for v in values]}; the rows held are "
                f"{[(c.shape, c.dtype, str(c.device)) for c in self._columns]}; clear() the cache first."
            )
        if self._stopped:
            return 0
        if not self._columns:
            self._columns = tuple(map(_Column.of, values))
        rows = _first_of_each(wanted, self._index.find(wanted) < 0)[: self._capacity - self.rows]
        rows = rows[: self._make_room(rows.numel())]
        for place, column in enumerate(self._columns):
            data = column.to_bytes(values[place] if len(rows) == len(wanted) else values[place][rows.to(column.device)])
            for chunk in self._chunks:
                start, end = max(self.rows, chunk.first), min(self.rows + len(rows), chunk.first + chunk.rows)
                if start < end:
                    part = data[start - self.rows : end - self.rows]
                    chunk.columns[place][start - chunk.first : end - chunk.first] = part
        self._index.add(wanted[rows], torch.arange(self.rows, self.rows + len(rows), device="cpu"))
        self.rows += len(rows)
        return len(rows)

    def _make_room(self, rows: int) -> int:
        """Allocate chunks for up to ``rows`` more rows; return the number that fits."""
        held = sum(chunk.rows for chunk in self._chunks)
        while held < self.rows + rows:
            size = max(1, min(max(held * self.row_bytes, _FIRST_CHUNK), _LARGEST_CHUNK) // max(self.row_bytes, 1))
            chunk = _Chunk(held, min(max(size, self.rows + rows - held), self._capacity - held))
            try:
                buffer = self._allocate(chunk.rows * self.row_bytes)
            except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory runs out
                self._stopped = True
                self._warn(chunk.rows * self.row_bytes, error)
                return held - self.rows
            for column in self._columns:
                part, buffer = buffer.split([chunk.rows * column.bytes, buffer.numel() - chunk.rows * column.bytes])
                chunk.columns.append(part.view(chunk.rows, column.bytes))
            self._chunks.append(chunk)
            held += chunk.rows
        return rows

    def _allocate(self, size: int) -> Tensor:
        if self.path is None or size == 0:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        if self._file is None:
            self._file = _File(self.path)
        return self._file.grow(size)

    def _warn(self, wanted: int, error: Exception) -> None:
        place = "memory"
        if self.path is not None:
            place = str(self.path)
            try:
                place += f" ({shutil.disk_usage(self.path).free:,} bytes free)"
            except OSError:
                place += " (free space unknown)"
        warnings.warn(
            f"the activation cache asked for {wanted:,} bytes in {place} and got: {error}. Training continues; the "
            f"{self.rows:,} rows held ({self.bytes:,} bytes) stay valid, but no more rows are cached. To cache more, "
            "free space, or pass another path= or a smaller budget_bytes.",
            CacheSpaceWarning,
            stacklevel=4,
        )

    def clear(self) -> None:
        """Drop all rows, hits and misses, and free the space. If the disk was full, the cache stays off."""
        self._forget()
        self.hits = self.misses = 0
        if self._file is not None:
            self._file.empty()

    def close(self) -> None:
        """Clear the cache, remove the file and store nothing from then on. A second call does nothing."""
        self._forget()
        self._stopped = True
        file, self._file = self._file, None
        if file is not None:
            file.remove()


class _File:
    """A file that grows by reserved, mapped pieces and is deleted with its owner."""

    def __init__(self, folder: Path) -> None:
        self._descriptor, self.name = tempfile.mkstemp(prefix="torchboost-activations-", dir=folder)
        self._size = 0
        self.remove: Callable[[], object] = weakref.finalize(self, _remove, self._descriptor, self.name)

    def grow(self, size: int) -> Tensor:
        """Reserve and map ``size`` more bytes.

        Raises:
            OSError: There is no room; the file is unchanged.
        """
        length = -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            # Only the offset of the next piece is rounded up, so the reserved space stays within the budget.
            _reserve(self._descriptor, self._size, size)
            mapped = mmap.mmap(self._descriptor, size, offset=self._size)
        except OSError:
            os.ftruncate(self._descriptor, self._size)
            raise
        self._size += length
        return torch.frombuffer(mapped, dtype=torch.uint8)

    def empty(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._size = 0


def _reserve(descriptor: int, start: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, start, size)
        return
    zeros = bytes(min(size, 2**20))  # if the system has no such call, reserve space by writing
    os.lseek(descriptor, start, os.SEEK_SET)
    while size > 0:
        size -= os.write(descriptor, zeros[: min(size, len(zeros))])


def _remove(descriptor: int, name: str) -> None:
    os.close(descriptor)
    Path(name).unlink(missing_ok=True)


def _first_of_each(ids: Tensor, wanted: Tensor) -> Tensor:
    """Positions where ``wanted`` is true, each id once, in order."""
    places = wanted.nonzero().flatten()
    ordered, order = ids[places].sort(stable=True)
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return places[order[first]].sort().values
