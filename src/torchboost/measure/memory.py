"""The peak memory of a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import TracebackType

import torch

__all__ = ["PeakMemory"]


class PeakMemory:
    """Measures how far the memory of a ``with`` block rises above what was held before it.

    On CUDA that is what torch allocates on the device. On CPUs under Linux it is the resident memory of the whole
    process, libraries and threads included, whose record of the peak is reset. Elsewhere ``bytes`` is None.

    Cost: a garbage collection.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif self._device.type == "cpu":
            _return_free_memory()
            self._before = _resident("VmRSS") if _reset() else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        on_gpu = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else _resident("VmHWM")
        self.bytes = None if peak is None else max(0, peak - self._before)


def _return_free_memory() -> None:
    """Let the C library return freed memory, which would hide a later use of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset() -> bool:
    """Reset the peak of the resident memory, and return whether that is possible here."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _resident(name: str) -> int | None:
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            found = next(line for line in file if line.startswith(name))
    except (OSError, StopIteration):
        return None
    return 1024 * int(found.split()[1])
