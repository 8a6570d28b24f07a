"""The peak memory of a piece of work."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from types import TracebackType
from typing import Any

import torch

__all__ = ["PeakMemory"]


class PeakMemory:
    """Measures how far the memory of a ``with`` block rises above what was held before it.

    On CUDA and XPU that is what torch allocates on the device. On CPUs under Linux it is the resident memory of the
    whole process, libraries and threads included, whose record of the peak is reset. Elsewhere ``bytes`` is None.

    Cost: a garbage collection.

    Args:
        device: Where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
        self._device = device
        self._counts: Any = module if hasattr(module, "max_memory_allocated") else None
        self._before: int | None = None
        self.bytes: int | None = None

    def __enter__(self) -> PeakMemory:
        gc.collect()
        if self._counts is not None:
            self._counts.reset_peak_memory_stats(self._device)
            self._before = self._counts.memory_allocated(self._device)
        elif self._device.type == "cpu":
            _return_free_memory()
            self._before = _resident("VmRSS") if _reset() else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is None:
            return
        counts = self._counts
        peak = _resident("VmHWM") if counts is None else counts.max_memory_allocated(self._device)
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
