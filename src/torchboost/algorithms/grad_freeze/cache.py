"""The output of the frozen part of a network, computed once per sample and kept with a fixed budget."""

from __future__ import annotations

import math
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from torchboost.algorithms.grad_freeze.halves import Call, Halves, halves_of
from torchboost.core.algorithm import Attachment
from torchboost.core.forward import cover_forward, own_forward
from torchboost.core.torch_private import versions
from torchboost.core.wrapping import wrapper_of
from torchboost.errors import CacheSpaceWarning, IncompatibleError

__all__ = ["ActivationCache", "FastPrefix", "FastPrefixReport", "check_cacheable"]

_CHUNKS = 64
"""The budget is allocated in this many chunks, each when it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPrefixReport:
    """Status of the cache of the frozen prefix.

    Args:
        parameters: Number of weights in the prefix; 0 if the forward runs unchanged.
        rows: Number of samples whose prefix outputs are cached.
        bytes: Size of the cached outputs.
        hit_rate: Share of named samples found in the cache since the prefix last changed; 0.0 before the first.
        note: Why the forward runs unchanged, or why nothing is cached; empty otherwise.
    """

    parameters: int = 0
    rows: int = 0
    bytes: int = 0
    hit_rate: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        text = (
            f"frozen prefix: {self.parameters:,} parameters; {self.rows:,} samples held "
            f"({self.bytes / 2**20:.1f} MiB), {self.hit_rate:.0%} of look-ups found"
        )
        return f"{text}; {self.note}" if self.note else text


def check_cacheable(model: nn.Module) -> None:
    """Refuse a model whose forward cannot be replaced.

    Raises:
        IncompatibleError: The model is wrapped or compiled, or has its own ``forward`` on the instance.
    """
    wrapper = wrapper_of(model)
    if wrapper is not None:
        raise IncompatibleError(
            f"grad_freeze: found a model wrapped by {wrapper}, whose forward the cache cannot replace; attach to the "
            "bare, uncompiled model and wrap it in DDP afterwards, or set cache_mebibytes=0."
        )
    if own_forward(model) is not None:
        raise IncompatibleError(
            f"grad_freeze: the forward of this {type(model).__name__} was replaced on the instance, so the cache does "
            "not know what runs; attach before that, or set cache_mebibytes=0."
        )


class FastPrefix(Attachment):
    """Computes the frozen first part of a network once per sample, and skips it from then on.

    The ``forward`` of this one instance is replaced. If the samples of a batch are named, it is cut in training mode
    before the first operation that uses a trainable parameter, draws random numbers (dropout), changes a buffer
    (BatchNorm in training mode), or writes into an input or a constant. The operations before the cut run under
    ``no_grad``, and their results are cached under the id of the sample. If all samples of a batch are cached, this
    part is skipped. Both parts call the model's own modules. In eval mode, with inputs that require gradients, or if no
    frozen part comes first, the forward runs unchanged. The cached rows are correct only if a sample is the same tensor
    in every epoch: no random augmentation.

    A parameter with ``requires_grad=False`` counts as frozen. Before each forward the model is compared with its last
    state: flags, the attributes of all modules (parameters, buffers, submodules and hooks among them), and versions and
    addresses of the frozen tensors. After any change the forward is traced again and the rows are dropped.

    Limits: Python state that is not an attribute of a module (a global, a list in a list) keeps its value from the
    trace; an in-place write to a frozen weight through ``.data`` is not detected; call :meth:`update` after either.
    While ``torch.fx`` traces the forward, it patches ``nn.Module`` for the whole process: no other thread should run a
    model at that moment.

    Cost: about 2 microseconds per module for the comparison; at every change one trace and a few passes through the
    prefix.

    Args:
        model: The bare model, in place. Wrap it in DDP afterwards.
        cache: An empty cache that is not used elsewhere; emptied by :meth:`remove`.

    Raises:
        IncompatibleError: See :func:`check_cacheable`. The first training step raises it if the forward cannot be
            traced.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> _ = model[0].requires_grad_(False)
        >>> with FastPrefix(model, ActivationCache(2**20)) as fast:
        ...     for epoch in range(2):
        ...         with fast.samples([5, 3]):
        ...             _ = model(torch.ones(2, 4))
        ...     fast.report().rows, fast.report().hit_rate
        (2, 0.5)
    """

    def __init__(self, model: nn.Module, cache: ActivationCache) -> None:
        check_cacheable(model)
        self._model, self._cache = model, cache
        self._named: list[int] = []
        self._note = "no training step has run yet"
        self.update()
        # Inside autocast, which is then on while the halves run.
        super().__init__(cover_forward(model, self._forward, innermost=True), undo=self._end)

    def update(self) -> None:
        """Trace the model again before the next forward, and drop all rows."""
        self._watch: _Watch | None = None
        self._key: Hashable = None
        self._halves: Halves | None = None
        self._cache.clear()

    def _end(self) -> None:
        self.update()
        self._note = "removed"

    @contextmanager
    def samples(self, ids: Tensor | Sequence[int]) -> Iterator[None]:
        """Name the samples of the next forward.

        Args:
            ids: One integer per sample of the batch, at least 0, shape ``(n,)``; the same for the same sample in
                every epoch.

        Raises:
            TypeError: ``ids`` are not integers.
            ValueError: They are not one-dimensional, or one is negative; or, raised from the forward, their number is
                wrong.
        """
        self._named = _sample_ids(ids)
        try:
            yield
        finally:
            self._named = []

    def report(self) -> FastPrefixReport:
        """Return the current sizes and hit rate."""
        halves, cache = self._halves, self._cache
        return FastPrefixReport(
            parameters=0 if halves is None else sum(p.numel() for p in halves.prefix.parameters()),
            rows=cache.rows,
            bytes=cache.bytes,
            hit_rate=cache.hits / max(1, cache.hits + cache.misses),
            note=self._note if halves is None else "",
        )

    def _forward(
        self, forward: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        ids, self._named = self._named, []
        # A deep copy of the model calls this too, with itself as the module.
        if not ids or module is not self._model or not module.training or torch.compiler.is_compiling():
            return forward(module, *args, **kwargs)
        call = Call.of(args, kwargs)
        if call is None:
            self._note = "an argument of the forward is neither a tensor nor a plain value"
        elif any(tensor.requires_grad for tensor in call.tensors):
            self._note = "an input requires gradients"
        elif not any(tensor.ndim and len(tensor) == len(ids) for tensor in call.tensors):
            shapes = [tuple(tensor.shape) for tensor in call.tensors]
            raise ValueError(f"samples: found {len(ids)} ids for inputs of shapes {shapes}.")
        else:
            halves = self._current(call, len(ids))
            border = None if halves is None else self._border(halves, call.tensors, ids)
            if halves is not None and border is not None:
                return halves.suffix.forward(*call.tensors, *border)
        return forward(module, *args, **kwargs)

    def _current(self, call: Call, count: int) -> Halves | None:
        """Return the halves for this kind of call, if there are any; find out again if the model has changed."""
        if self._watch is None or call.key != self._key or self._watch.changed():
            self.update()
            halves = halves_of(self._model, call, count)
            if isinstance(halves, str):
                self._note = halves
            else:
                self._halves = halves
            self._key, self._watch = call.key, _Watch(self._model, [] if self._halves is None else self._halves.frozen)
        return self._halves

    def _border(self, halves: Halves, tensors: tuple[Tensor, ...], ids: list[int]) -> tuple[Any, ...] | None:
        """Return the border values of a batch, or None if its samples are not like those of the rows."""
        if not halves.accepts(tensors, len(ids)):
            return None
        cache = self._cache
        slots = cache.find(ids)
        missing = [place for place, slot in enumerate(slots) if slot < 0]
        if not missing:
            return cache.read(slots)
        everything = len(missing) == len(ids)
        values = halves.border(tensors if everything else halves.select(tensors, missing))
        if not cache.fits(values):
            return None
        border = values if everything else cache.read(slots, values)
        cache.store([ids[place] for place in missing], values)
        return border


def _sample_ids(ids: Tensor | Sequence[int]) -> list[int]:
    """Return sample ids as a list.

    Args:
        ids: One integer per sample, at least 0; shape ``(n,)``.

    Raises:
        TypeError: The ids are not integers.
        ValueError: Not one-dimensional, or one is negative.
    """
    samples = ids if isinstance(ids, Tensor) else torch.as_tensor(ids, device="cpu")
    if samples.numel() and (samples.dtype is torch.bool or samples.is_floating_point() or samples.is_complex()):
        raise TypeError(f"sample ids: found {samples.dtype}; pass the integer index of each sample.")
    if samples.ndim != 1:
        raise ValueError(f"sample ids: found shape {tuple(samples.shape)}; expected one id per sample, shape (n,).")
    listed = samples.tolist()
    if listed and min(listed) < 0:
        raise ValueError(f"sample ids: found {min(listed)}; expected ids of 0 or more.")
    return listed


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

    def space(self, count: int, folder: str | os.PathLike[str] | None) -> Tensor:
        """Return space for rows in memory order, in memory or in a file without a name in a folder."""
        shape = (count, *(self.shape[d - 1] for d in self.order[1:]))
        size = count * self.bytes
        if folder is None or size == 0:
            return torch.empty(shape, dtype=self.dtype, device="cpu")
        with tempfile.TemporaryFile(dir=folder) as file:
            # A write to a mapped page without space ends the process, so the space is taken now.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                for start in range(0, size, 2**20):
                    file.write(bytes(min(2**20, size - start)))
                file.flush()
            return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=self.dtype).view(shape)

    def rows(self, value: Tensor) -> Sequence[Tensor]:
        return value.detach().permute(self.order).cpu().unbind()

    def batch(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(rows)).permute([self.order.index(d) for d in range(len(self.order))]).to(self.device)


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
        >>> cache.store([7, 3], (torch.tensor([[1.0], [2.0]]),))
        >>> cache.read(cache.find([3]))
        (tensor([[2.]]),)
    """

    def __init__(self, budget_bytes: int, *, path: str | os.PathLike[str] | None = None) -> None:
        if path is not None and not os.path.isdir(path):
            raise ValueError(
                f"path: found {os.fspath(path)!r}, which is not a directory; create it, or pass another path."
            )
        self._budget, self._path = budget_bytes, path
        self._full = False
        self.clear()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self._slots)

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self._row_bytes

    def find(self, ids: Sequence[int]) -> list[int]:
        """Return the slot of every sample, -1 if it is not kept. Counts hits."""
        slots = [self._slots.get(sample, -1) for sample in ids]
        missing = slots.count(-1)
        self.hits += len(slots) - missing
        self.misses += missing
        return slots

    def read(self, slots: Sequence[int], missing: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Return copies of the rows in the given slots, of shape ``(len(slots), ...)``, on their original device.

        Args:
            slots: From :meth:`find`, at least one.
            missing: The rows for slots of -1, in their order: tensors that :meth:`fits`, of shape ``(m, ...)``.
        """
        batches = []
        for at, column in enumerate(self._columns):
            others = iter(column.rows(missing[at]) if missing else ())
            places = [divmod(slot, self._chunk_rows) for slot in slots]
            batches.append(column.batch([self._chunks[a][at][b] if a >= 0 else next(others) for a, b in places]))
        return tuple(batches)

    def fits(self, values: Sequence[Tensor]) -> bool:
        """Whether tensors match the rows held in shape per sample, dtype and device; true if the cache is empty."""
        same = len(values) == len(self._columns) and all(c.fits(v) for c, v in zip(self._columns, values, strict=True))
        return same or not self._columns

    def store(self, ids: Sequence[int], values: Sequence[Tensor]) -> None:
        """Store rows that are not kept yet, if there is room.

        Args:
            ids: One per sample.
            values: Tensors of shape ``(len(ids), ...)``; only the number of rows may differ between calls.
        """
        if not self._columns:
            self._columns = tuple(map(_Column.of, values))
            self._row_bytes = sum(column.bytes for column in self._columns)
            self._capacity = self._budget // max(self._row_bytes, 1)
            self._chunk_rows = max(1, math.ceil(self._capacity / _CHUNKS))
        rows = [column.rows(value) for column, value in zip(self._columns, values, strict=True)]
        for place, sample in enumerate(ids):
            if sample in self._slots:
                continue
            number, offset = divmod(self.rows, self._chunk_rows)
            if self.rows >= self._capacity or (number == len(self._chunks) and not self._grow()):
                return
            for part, row in zip(self._chunks[number], rows, strict=True):
                part[offset] = row[place]
            self._slots[sample] = self.rows

    def _grow(self) -> bool:
        """Allocate a chunk; return whether there was space for it."""
        rows = min(self._chunk_rows, self._capacity - self.rows)
        if not self._full:
            try:
                self._chunks.append([column.space(rows, self._path) for column in self._columns])
            except (OSError, MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory runs out
                self._full = True
                self._warn(rows * self._row_bytes, error)
        return not self._full

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


class _Watch:
    """Detects changes of a model since the halves of its forward were built."""

    def __init__(self, model: nn.Module, frozen: Iterable[Tensor]) -> None:
        self._modules, self._parameters = list(model.modules()), list(model.parameters())
        self._frozen = [t for t in frozen if t.ndim or t.is_floating_point()]  # skips batch counters
        self._before = self._look()

    def changed(self) -> bool:
        """Whether anything changed."""
        attributes, numbers = self._look()
        same = numbers == self._before[1] and len(attributes) == len(self._before[0])
        return not (same and all(map(is_, attributes, self._before[0])))

    def _look(self) -> tuple[list[Any], list[Any]]:
        """Return all attributes of the modules, which are compared by identity, and flags, versions and addresses."""
        attributes: list[Any] = []  # holding them keeps their addresses
        for module in self._modules:
            attributes += (type(module), type(module).forward, *vars(module).values())
            for value in vars(module).values():
                if isinstance(value, dict):
                    attributes += value.keys()
                    attributes += value.values()
                elif type(value) in (list, set):
                    attributes += value
        numbers = [p.requires_grad for p in self._parameters]
        return attributes, [*numbers, *versions(self._frozen), *(t.data_ptr() for t in self._frozen)]
