"""Let memory that is not written hold large numbers, so that kernels that read it show themselves."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

__all__ = ["dirty_memory", "fill_freed_memory"]

_GARBAGE = 1e30
_LARGEST_BLOCK = 2**22
"""Entries of the largest block that is filled; what is larger, the system hands out as zeros."""
_SMALL, _SMALL_BLOCKS, _LARGE_BLOCKS = 4096, 16, 4
"""Entries of a small block, and how many blocks of each size are filled. A pass allocates many small ones."""
_PERTURB, _BYTE = -6, 0x8E
"""``M_PERTURB`` of glibc, and a byte whose complement, four times, is 1.2e30 as float32 and as bfloat16."""


@contextmanager
def dirty_memory() -> Iterator[None]:
    """Run the block with an allocator that fills all memory that it hands out with large numbers.

    This is ``mallopt(M_PERTURB)`` of glibc, which holds for all threads of the process. Programs that read only what
    they have written do not see it. Elsewhere, and for other allocators, nothing happens.
    """
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_PERTURB, _BYTE)
    try:
        yield
    finally:
        mallopt(_PERTURB, 0)


def fill_freed_memory(sizes: Iterable[int], device: torch.device) -> None:
    """Fill blocks of memory with large numbers and free them, so that the next allocations find those.

    Args:
        sizes: Entries of float32 of tensors that the next pass allocates; powers of two are added.
        device: Where.
    """
    wanted = [size for size in sizes if 0 < size <= _LARGEST_BLOCK] + [2**power for power in range(4, 21)]
    counted = [(size, _SMALL_BLOCKS if size <= _SMALL else _LARGE_BLOCKS) for size in wanted]
    blocks = [torch.full((size,), _GARBAGE, device=device) for size, count in counted for _ in range(count)]
    blocks.clear()


def _mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
