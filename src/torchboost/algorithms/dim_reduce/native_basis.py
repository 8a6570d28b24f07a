"""The products of a basis at the speed of the memory, on the CPU: the Python side of ``subspace_kernel.c``."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torchboost.core.native import compiled
from torchboost.errors import IncompatibleError

__all__ = ["check", "lift", "project"]

PART = 8192
"""Columns that are worked on at a time: what is summed up over them stays in the cache of a core."""


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Refuse rows that the kernel does not support, and compile it.

    Raises:
        IncompatibleError: Another device or precision; no compiler.
    """
    if device.type != "cpu" or dtype is not torch.float32:
        raise IncompatibleError(
            f"native=True: found {dtype} on {device}; the kernel supports float32 on the CPU only. Leave native out."
        )
    _load()


def project(rows: Tensor, vector: Tensor) -> Tensor:
    """Return ``rows @ vector``, shape ``(k,)``, summed up over parts in float64.

    Args:
        rows: Shape ``(k, n)``, float32 on the CPU.
        vector: Shape ``(n,)``, likewise.

    Raises:
        ValueError: Other shapes, precisions or devices.
    """
    _check_one("rows", rows, tuple(rows.shape))
    _check_one("vector", vector, (rows.shape[1],))
    sums = torch.empty(-(-rows.shape[1] // PART), len(rows), dtype=torch.float64, device="cpu")
    _load().project(*_matrix(rows), vector.data_ptr(), sums.data_ptr(), torch.get_num_threads())
    return sums.sum(0)


def lift(rows: Tensor, coordinates: Tensor, out: Tensor) -> None:
    """Write ``coordinates @ rows`` to ``out``.

    Args:
        rows: Shape ``(k, n)``, float32 on the CPU.
        coordinates: Shape ``(vectors, k)``, likewise.
        out: Shape ``(vectors, n)``, likewise.

    Raises:
        ValueError: Other shapes, precisions or devices.
    """
    _check_one("rows", rows, tuple(rows.shape))
    coordinates = coordinates.contiguous()
    _check_one("coordinates", coordinates, (len(coordinates), len(rows)))
    _check_one("out", out, (len(coordinates), rows.shape[1]))
    if not len(rows):
        out.zero_()
        return
    given = (coordinates.data_ptr(), len(coordinates))
    _load().lift(*_matrix(rows), *given, out.data_ptr(), out.stride(0), torch.get_num_threads())


def _matrix(rows: Tensor) -> tuple[int, ...]:
    return rows.data_ptr(), rows.stride(0), *rows.shape, PART


def _check_one(name: str, found: Tensor, shape: tuple[int, ...]) -> None:
    """Check a tensor, since the kernel does not check its pointers."""
    if found.dtype is not torch.float32 or found.device.type != "cpu" or tuple(found.shape) != shape:
        raise ValueError(
            f"{name}: found shape {tuple(found.shape)} of {found.dtype} on {found.device}; with native=True it is "
            f"{shape} of torch.float32 on the CPU."
        )
    if found.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"{name}: found strides {found.stride()}; with native=True each row must be contiguous.")


@cache
def _load() -> ctypes.CDLL:
    kernel = compiled(Path(__file__).with_name("subspace_kernel.c"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    matrix = (pointer, number, number, number, number)
    kernel.project.argtypes = [*matrix, pointer, pointer, ctypes.c_int]
    kernel.lift.argtypes = [*matrix, pointer, number, pointer, number, ctypes.c_int]
    kernel.project.restype = kernel.lift.restype = None
    return kernel
