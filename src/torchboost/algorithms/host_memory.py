"""Keep freed host memory in the process, so that every training step finds its pages already there."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from torchboost.core.algorithm import Algorithm, Attachment, Target, Traits
from torchboost.errors import IncompatibleError

__all__ = ["HostMemory", "retain_host_memory"]

# Parameters of mallopt(3), from glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_NEVER = -1
_MIB = 1 << 20


def retain_host_memory() -> Attachment:
    """Let the C library keep freed memory instead of returning it to the operating system.

    On a CPU every activation and gradient is host memory. glibc returns large freed blocks to the operating system;
    the next step may get them back as fresh pages, and each first touch of a page is a fault that costs about a
    microsecond. How often that happens depends on how the heap lies: measure. This sets two parameters of
    ``mallopt(3)``: never trim the heap (``M_TRIM_THRESHOLD``) and no mappings of their own for large blocks
    (``M_MMAP_MAX``). Numbers do not change.

    The setting is the process's: it acts on everything that calls ``malloc``, and the first ``remove()`` ends it for
    all attachments. Cost: the process keeps its peak memory until then. Memory of GPUs, which torch manages
    itself, is not concerned.

    Returns:
        Its ``remove()`` returns what is free and sets the upper ends of glibc's own adaptive thresholds (32 MiB for
        mappings, 64 MiB for trimming); glibc offers no way back to adapting them.

    Raises:
        IncompatibleError: The C library is not glibc.

    Example:
        >>> from torchboost.algorithms.host_memory import retain_host_memory
        >>> effect = retain_host_memory()
        >>> effect.remove()
    """
    _refuse()
    library = ctypes.CDLL(None)
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, _NEVER)

    def give_back() -> None:
        library.mallopt(_MMAP_MAX, 65536)
        library.mallopt(_MMAP_THRESHOLD, 32 * _MIB)
        library.mallopt(_TRIM_THRESHOLD, 64 * _MIB)
        library.malloc_trim(0)

    return Attachment(undo=give_back)


@dataclass(frozen=True, kw_only=True)
class HostMemory(Algorithm):
    """Settings of :func:`retain_host_memory`; there are none."""

    name: ClassVar[str] = "host_memory"
    traits: ClassVar[Traits] = Traits(order=5, process_wide=True)

    def idle(self, model: nn.Module, optimizer: Optimizer) -> str | None:
        """Say so when the C library is not glibc."""
        return _obstacle()

    def check(self, target: Target) -> None:
        """Refuse a C library other than glibc."""
        _refuse()

    def attach(self, target: Target) -> Attachment:
        """Set the process up."""
        return retain_host_memory()


def _refuse() -> None:
    obstacle = _obstacle()
    if obstacle is not None:
        raise IncompatibleError(f"host_memory: {obstacle}; leave it out, or preload jemalloc or tcmalloc instead.")


def _obstacle() -> str | None:
    if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return "needs the memory allocator of glibc, which this platform does not have"
    return None
