"""Copy weights and gradients of a device through two host buffers, chunk by chunk, while the host updates them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchboost.core.torch_private import foreach
from torchboost.optim.memory_layout import is_dense, same_layout
from torchboost.optim.rules.base import Batch

__all__ = [
    "SMALLEST_CHUNK",
    "Job",
    "Piece",
    "Staging",
    "Transfer",
    "split",
]

GRAIN = 256
"""Tensors are cut at multiples of this many entries, so that vector kernels round as for the whole tensor."""

ALIGNMENT = 64
SMALLEST_CHUNK = 8192
"""Bytes that hold a grain of the widest type."""


@dataclass(slots=True)
class Job:
    """A parameter to update. All tensors have its shape, and those on the host its memory order.

    Args:
        group: Options of the update.
        param: Read and written on its device.
        grad: On the same device.
        step: Updates so far, on the host; incremented by 1.
        moments: State of the update by name, on the host.
        master: The tensor that the host updates in place of the parameter's value, if there is one.
    """

    group: Mapping[str, Any]
    param: Tensor
    grad: Tensor
    step: Tensor
    moments: dict[str, Tensor]
    master: Tensor | None = None

    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Return the types of its tensors in a buffer: gradient, weight, and the gradient cast for the host."""
        wanted = self.param.dtype if self.master is None else self.master.dtype
        return self.grad.dtype, self.param.dtype, *(() if self.grad.dtype == wanted else (wanted,))

    def itemsizes(self) -> tuple[int, ...]:
        """Return the bytes per entry of these types."""
        return tuple(dtype.itemsize for dtype in self.dtypes())


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a parameter, flat in memory order, and its place in the buffer in bytes."""

    job: int
    start: int
    length: int
    offset: int

    def end(self, itemsizes: Sequence[int]) -> int:
        """Return where the next piece may start."""
        return self.offset + sum(_padded(self.length * size) for size in itemsizes)


class Transfer:
    """Copies between a device and two host buffers ("slots"), on one stream per direction.

    Both directions overlap with each other and with the host. A pass calls :meth:`begin`, then per chunk
    :meth:`to_host`, :meth:`wait` and :meth:`to_device` with its slot, and finally :meth:`end`. The next chunk is
    requested before the wait.

    Args:
        module: The module with streams and events, such as ``torch.cuda``; None copies at once.
        device: The device.
    """

    def __init__(self, module: Any = None, device: torch.device | None = None) -> None:
        self._module, self._device = module, device
        if module is not None:
            self._down, self._up = module.Stream(device=device), module.Stream(device=device)
            self._edge = module.Event()
            self._filled = (module.Event(), module.Event())
            self._emptied = (module.Event(), module.Event())

    def begin(self) -> None:
        """Order the copies after the work queued on the device so far."""
        if self._module is not None:
            self._edge.record(self._module.current_stream(self._device))
            self._down.wait_event(self._edge)
            self._up.wait_event(self._edge)

    def to_host(self, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy into a slot, once its last content is on the device."""
        if self._module is None:
            self.copy(targets, sources)
            return
        self._down.wait_event(self._emptied[slot])
        with self._module.stream(self._down):
            self.copy(targets, sources)
        self._filled[slot].record(self._down)

    def wait(self, slot: int) -> None:
        """Block the host until the slot is filled."""
        if self._module is not None:
            self._filled[slot].synchronize()

    def to_device(self, slot: int, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy out of a slot, and record when the slot is free again."""
        if self._module is None:
            self.copy(targets, sources)
            return
        with self._module.stream(self._up):
            self.copy(targets, sources)
        self._emptied[slot].record(self._up)

    def end(self) -> None:
        """Order the device's further work after the copies; the host does not wait."""
        if self._module is not None:
            self._edge.record(self._up)
            self._module.current_stream(self._device).wait_event(self._edge)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Queue the copies on the current stream; into and from page-locked buffers the calls return at once."""
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=self._module is not None)


@dataclass(slots=True)
class _Loaded:
    """The tensors of a piece: on the device, in the buffer, and those that the host updates."""

    group: Mapping[str, Any]
    grad: Tensor
    param: Tensor
    staged_grad: Tensor
    staged_param: Tensor
    cast: Tensor | None
    weight: Tensor
    state: dict[str, Any]


class Staging:
    """Two host buffers for one device, and the passes through them; at most ``2 * chunk_bytes`` of host memory.

    Args:
        transfer: Does the copies.
        chunk_bytes: Size of a buffer, at least :data:`SMALLEST_CHUNK`.
        pinned: Page-lock the buffers; otherwise copies do not overlap with the host.
    """

    def __init__(self, transfer: Transfer, chunk_bytes: int, *, pinned: bool) -> None:
        self._transfer, self._limit, self._pinned = transfer, chunk_bytes, pinned
        self._slots: list[Tensor] = []

    @property
    def allocated(self) -> int:
        """Bytes of the buffers."""
        return sum(slot.numel() for slot in self._slots)

    def run(self, jobs: Sequence[Job], update: Callable[[Mapping[str, Any], Batch], None]) -> None:
        """Update all jobs; return when all copies are queued and ordered before the device's further work.

        Args:
            jobs: The parameters to update.
            update: Called with options and tensors on the host; changes the tensors in place.
        """
        weights = [_dense(_real(job.param)) for job in jobs]
        flat = [_flattened(job, weight) for job, weight in zip(jobs, weights, strict=True)]
        chunks = list(split([(job.param.numel(), job.itemsizes()) for job in flat], self._limit))
        self._reserve(flat, chunks)
        self._transfer.begin()
        try:
            self._pass(flat, chunks, update)
        finally:
            self._transfer.end()
        if jobs:
            foreach.add_([job.step for job in jobs], 1)
        for job, weight in zip(jobs, weights, strict=True):
            if weight.data_ptr() != job.param.data_ptr():
                _real(job.param).copy_(weight)

    def _pass(
        self, jobs: Sequence[Job], chunks: Sequence[list[Piece]], update: Callable[[Mapping[str, Any], Batch], None]
    ) -> None:
        transfer = self._transfer
        ahead = self._fetch(jobs, chunks[0], 0) if chunks else []
        for number in range(len(chunks)):
            loaded, slot = ahead, number % 2
            if number + 1 < len(chunks):
                ahead = self._fetch(jobs, chunks[number + 1], 1 - slot)
            transfer.wait(slot)
            _update(loaded, update)
            transfer.to_device(slot, [piece.param for piece in loaded], [piece.staged_param for piece in loaded])

    def _reserve(self, jobs: Sequence[Job], chunks: Sequence[Sequence[Piece]]) -> None:
        size = max((piece.end(jobs[piece.job].itemsizes()) for chunk in chunks for piece in chunk[-1:]), default=0)
        wanted = min(len(chunks), 2)
        if len(self._slots) < wanted or any(slot.numel() < size for slot in self._slots):
            self._slots = []  # freed first
            host = {"dtype": torch.uint8, "device": "cpu", "pin_memory": self._pinned}
            self._slots = [torch.empty(size, **host) for _ in range(wanted)]

    def _fetch(self, jobs: Sequence[Job], chunk: Sequence[Piece], slot: int) -> list[_Loaded]:
        """Queue the copies of the gradients and weights of a chunk."""
        loaded = [_load(jobs[piece.job], piece, self._slots[slot]) for piece in chunk]
        targets, sources = [piece.staged_grad for piece in loaded], [piece.grad for piece in loaded]
        # If the host has a master, it does not need the weight.
        plain = [piece for piece in loaded if piece.weight is piece.staged_param]
        targets += [piece.staged_param for piece in plain]
        sources += [piece.param for piece in plain]
        self._transfer.to_host(slot, targets, sources)
        return loaded


def split(sizes: Sequence[tuple[int, tuple[int, ...]]], limit: int) -> Iterator[list[Piece]]:
    """Pack tensors into chunks of at most ``limit`` bytes; those that do not fit are cut at multiples of a grain.

    Args:
        sizes: Per tensor the number of entries, and the bytes per entry in each region of the buffer.
        limit: Bytes, at least :data:`SMALLEST_CHUNK`.
    """
    chunk: list[Piece] = []
    used = 0
    for job, (count, itemsizes) in enumerate(sizes):
        start = 0
        while start < count:
            room = max(limit - used - ALIGNMENT * len(itemsizes), 0) // sum(itemsizes)
            length = count - start if count - start <= room else room // GRAIN * GRAIN
            if length == 0:
                yield chunk
                chunk, used = [], 0
                continue
            chunk.append(Piece(job, start, length, used))
            used = chunk[-1].end(itemsizes)
            start += length
    if chunk:
        yield chunk


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _dense(tensor: Tensor) -> Tensor:
    return tensor if is_dense(tensor) else torch.empty_like(tensor).copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def _flattened(job: Job, weight: Tensor) -> Job:
    """Return the job with flat real tensors in the same order of entries; most are views."""
    grad = _real(job.grad)
    if not same_layout(grad, weight):
        grad = torch.empty_like(weight, dtype=grad.dtype).copy_(grad)
    moments = {key: _flat(_real(value)) for key, value in job.moments.items()}
    master = None if job.master is None else _flat(job.master)
    return Job(job.group, _flat(weight), _flat(grad), job.step, moments, master)


def _load(job: Job, piece: Piece, slot: Tensor) -> _Loaded:
    """Return the tensors of a piece."""

    def cut(tensor: Tensor) -> Tensor:
        whole = piece.length == tensor.numel()
        return tensor if whole else tensor[piece.start : piece.start + piece.length]

    regions = []
    offset = piece.offset
    for dtype in job.dtypes():
        size = piece.length * dtype.itemsize
        regions.append(slot[offset : offset + size].view(dtype))
        offset += _padded(size)
    return _Loaded(
        group=job.group,
        grad=cut(job.grad),
        param=cut(job.param),
        staged_grad=regions[0],
        staged_param=regions[1],
        cast=regions[2] if len(regions) > 2 else None,
        weight=regions[1] if job.master is None else cut(job.master),
        # The update increments a copy; a parameter in several pieces is counted once, at the end.
        state={key: cut(value) for key, value in job.moments.items()} | {"step": job.step.clone()},
    )


def _update(loaded: Sequence[_Loaded], update: Callable[[Mapping[str, Any], Batch], None]) -> None:
    """Update the pieces of a chunk and leave the new weights in the buffer."""
    for _, run in itertools.groupby(loaded, key=lambda piece: id(piece.group)):
        pieces = list(run)
        grads = [p.staged_grad if p.cast is None else p.cast.copy_(p.staged_grad) for p in pieces]
        update(pieces[0].group, Batch([p.weight for p in pieces], grads, [p.state for p in pieces]))
        for piece in pieces:
            if piece.weight is not piece.staged_param:
                piece.staged_param.copy_(piece.weight)
