"""A cache of rows of tensors by sample id, in memory or in memory-mapped files, with a fixed budget."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchboost.errors import CacheSpaceWarning

__all__ = ["ActivationCache", "sample_ids"]

_SMALLEST_CHUNK = 16 * 2**20
_MOST_CHUNKS = 64


def sample_ids(ids: Tensor | Sequence[int]) -> Tensor:
    """Return sample ids as a one-dimensional int64 tensor on the CPU.

    Args:
        ids: One integer per sample, at least 0; shape ``(n,)``.

    Raises:
        TypeError: The ids are not integers.
        ValueError: Not one-dimensional, or one is negative.
    """
    samples = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    if samples.numel() == 0:
        samples = samples.long()
    if samples.dtype in (torch.bool, torch.uint64) or samples.is_floating_point() or samples.is_complex():
        raise TypeError(f"sample ids: found {samples.dtype}; pass the integer index of each sample.")
    if samples.ndim != 1:
        raise ValueError(f"sample ids: found shape {tuple(samples.shape)}; expected one id per sample, shape (n,).")
    samples = samples.to("cpu", torch.int64)
    if samples.numel() and int(samples.min()) < 0:
        raise ValueError(f"sample ids: found {int(samples.min())}; expected ids of 0 or more.")
    return samples


@dataclass(frozen=True, slots=True)
class _Column:
    """The layout of one of the tensors in a row.

    Args:
        shape: Shape of a sample.
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

    def fits(self, value: Tensor) -> bool:
        return (tuple(value.shape[1:]), value.dtype, value.device) == (self.shape, self.dtype, self.device)

    def rows(self, count: int, folder: str | os.PathLike[str] | None = None) -> Tensor:
        """Return space for rows in memory order, in memory or in a file without a name in a folder."""
        shape = (count, *(self.shape[d - 1] for d in self.order[1:]))
        size = count * self.bytes
        if folder is None or size == 0:
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file, size)
            mapped = mmap.mmap(file.fileno(), size)
        return torch.frombuffer(mapped, dtype=self.dtype).view(shape)

    def dense(self, value: Tensor) -> Tensor:
        return value.detach().permute(self.order)

    def restored(self, rows: Tensor) -> Tensor:
        return rows.permute([self.order.index(d) for d in range(len(self.order))]).to(self.device)


def _reserve(file: Any, size: int) -> None:
    """Take the space of a file now: a write to a mapped page without space ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = bytes(2**20)
    for start in range(0, size, len(zeros)):
        file.write(zeros[: size - start])
    file.flush()


class ActivationCache:
    """Caches what a network computed for a sample.

    A row is a tuple of tensors of one sample: one index of dimension 0 of a batch. Rows are kept in order of arrival
    until ``budget_bytes`` are used, and none is evicted. Reading returns copies.

    With ``path``, rows are in memory-mapped files, which the operating system pages in and out. They have no name, so
    nothing remains of them after the process. Space is reserved in chunks before use. If the disk or the memory is
    full, the cache warns and keeps no more rows, while existing rows remain valid.

    Cost: memory or disk up to the budget, about 100 bytes per row for the index, and one copy per row in and out.

    Args:
        budget_bytes: Maximum number of bytes for rows.
        path: Existing directory for the files; None keeps rows in memory.

    Attributes:
        hits: Samples found since the last :meth:`clear`.
        misses: Samples not found since then.

    Raises:
        ValueError: ``path`` is not a directory.

    Example:
        >>> import torch
        >>> cache = ActivationCache(2**20)
        >>> cache.store(torch.tensor([7, 3]), (torch.tensor([[1.0], [2.0]]),))
        >>> cache.read(cache.find(torch.tensor([3])))
        (tensor([[2.]]),)
    """

    def __init__(self, budget_bytes: int, *, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None and not os.path.isdir(path):
            raise ValueError(
                f"path: found {os.fspath(path)!r}, which is not a directory; create it, or pass another path."
            )
        self._budget, self._path = budget_bytes, path
        self._stopped = False
        self.clear()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._slots)

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self._row_bytes

    def find(self, ids: Tensor) -> Tensor:
        """Return the slot of every sample, -1 if it is not kept; int64 of shape ``(n,)``. Counts hits."""
        slots = torch.tensor([self._slots.get(i, -1) for i in ids.tolist()], dtype=torch.int64, device="cpu")
        known = int((slots >= 0).sum())
        self.hits += known
        self.misses += len(slots) - known
        return slots

    def read(self, slots: Tensor, missing: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return copies of the rows in the given slots, of shape ``(len(slots), ...)``, on their original device.

        Args:
            slots: From :meth:`find`, shape ``(n,)``.
            missing: The rows for slots of -1, in their order: tensors that :meth:`fits`, of shape ``(m, ...)``.
        """
        owners = slots.div(self._chunk_rows, rounding_mode="floor")
        places = [(number, (owners == number).nonzero().flatten()) for number in owners.unique().tolist()]
        result = []
        for at, column in enumerate(self._columns):
            if len(places) == 1 and places[0][0] >= 0:
                number = places[0][0]
                rows = self._chunks[number][at].index_select(0, slots - number * self._chunk_rows)
            else:
                rows = column.rows(len(slots))
                for number, here in places:
                    if number < 0:
                        rows[here] = column.dense(missing[at]).cpu()
                    else:
                        rows[here] = self._chunks[number][at].index_select(0, slots[here] - number * self._chunk_rows)
            result.append(column.restored(rows))
        return tuple(result)

    def fits(self, values: Sequence[Tensor]) -> bool:
        """Whether tensors match the rows held in shape per sample, dtype and device; true if the cache is empty."""
        same = len(values) == len(self._columns) and all(c.fits(v) for c, v in zip(self._columns, values, strict=True))
        return same or not self._columns

    def store(self, ids: Tensor, values: Sequence[Tensor]) -> None:
        """Store rows that are not kept yet, if there is room.

        Args:
            ids: One per sample, shape ``(n,)``.
            values: Tensors of shape ``(n, ...)``; only ``n`` may differ between calls.
        """
        if not self._columns:
            self._columns = tuple(map(_Column.of, values))
            self._row_bytes = sum(column.bytes for column in self._columns)
            self._capacity = self._budget // max(self._row_bytes, 1)
            chunk = max(_SMALLEST_CHUNK, self._budget // _MOST_CHUNKS)
            self._chunk_rows = max(1, chunk // max(self._row_bytes, 1))
        new: dict[int, int] = {}
        for place, sample in enumerate(ids.tolist()):
            if sample not in self._slots:
                new.setdefault(sample, place)
        first, room = self.rows, self._room(len(new))
        places = torch.tensor(list(new.values())[:room], dtype=torch.int64, device="cpu")
        at = 0
        while at < room:
            number, offset = divmod(first + at, self._chunk_rows)
            count = min(room - at, self._chunk_rows - offset)
            for part, column, value in zip(self._chunks[number], self._columns, values, strict=True):
                part[offset : offset + count] = column.dense(value[places[at : at + count].to(value.device)])
            at += count
        self._slots.update(zip(list(new)[:room], range(first, first + room), strict=True))

    def _room(self, count: int) -> int:
        """Allocate chunks for up to ``count`` more rows; return the number that fits."""
        count = min(count, self._capacity - self.rows)
        while not self._stopped and (allocated := len(self._chunks) * self._chunk_rows) < self.rows + count:
            rows = min(self._chunk_rows, self._capacity - allocated)
            try:
                self._chunks.append([column.rows(rows, self._path) for column in self._columns])
            except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory runs out
                self._stopped = True
                self._warn(rows * self._row_bytes, error)
        return min(count, len(self._chunks) * self._chunk_rows - self.rows)

    def _warn(self, size: int, error: Exception) -> None:
        place = "memory"
        if self._path is not None:
            place = os.fspath(self._path)
            try:
                place += f" ({shutil.disk_usage(place).free:,} bytes free)"
            except OSError:
                place += " (free space unknown)"
        warnings.warn(
            f"the activation cache asked for {size:,} bytes in {place} and got: {error}. Training continues; the "
            f"{self.rows:,} rows held ({self.bytes:,} bytes) stay valid, but no more rows are cached. To cache more, "
            "free space, or pass another cache_path or fewer cache_mebibytes.",
            CacheSpaceWarning,
            stacklevel=4,
        )

    def clear(self) -> None:
        """Drop all rows, hits and misses, and free the space. If the disk was full, the cache remains off."""
        self.hits = self.misses = 0
        self._row_bytes = self._capacity = 0
        self._chunk_rows = 1
        self._slots: dict[int, int] = {}
        self._columns: tuple[_Column, ...] = ()
        self._chunks: list[list[Tensor]] = []
