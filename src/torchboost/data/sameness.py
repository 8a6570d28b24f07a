"""Whether two batches are equal bit for bit, and the memory that a batch holds."""

from __future__ import annotations

import io
import pickle
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (str, bytes, bytearray, int, bool, float, complex, type(None))
Array = Tensor | np.ndarray


def same(first: Any, second: Any) -> bool:
    """Whether two batches have the same types, the same structure and the same bits.

    Tensors are compared with their strides, NaN equals NaN of the same bits, and 0.0 differs from -0.0. Objects of
    other types are compared by their pickles, as a worker sends them.
    """
    try:
        (structure, arrays), (other, others) = parts_of(first), parts_of(second)
        return structure == other and all(map(_same_arrays, arrays, others))
    except Exception:  # an object that cannot be pickled, or one that contains itself
        return False


def parts_of(batch: Any) -> tuple[bytes, list[Array]]:
    """Return the structure of a batch as a pickle, which may fail, and its tensors and arrays, left out of it."""
    sink = io.BytesIO()
    pickler = _Structure(sink)
    pickler.dump(batch)
    return sink.getvalue(), pickler.arrays


class _Structure(pickle.Pickler):
    def __init__(self, sink: io.BytesIO) -> None:
        super().__init__(sink, protocol=pickle.HIGHEST_PROTOCOL)
        self.fast = True  # equal objects count, not the same ones
        self.arrays: list[Array] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Array) or (isinstance(obj, np.ndarray) and obj.dtype.hasobject):
            return None
        self.arrays.append(obj)
        return type(obj), getattr(obj, "__dict__", None) or None


def bytes_of(batch: Any) -> int:
    """Return how many bytes the dense tensors and the arrays of a batch hold. 0 if it cannot be sent."""
    with suppress(Exception):
        return sum(array.nbytes for array in parts_of(batch)[1] if _is_dense(array))
    return 0


def can_be_pinned(batch: Any) -> bool:
    """Whether torch keeps the types of a batch if it copies it to pinned memory. It makes lists of tuples."""
    if isinstance(batch, Tensor):
        return batch.device.type == "cpu" and _is_dense(batch)
    if type(batch) is dict:
        return all(map(can_be_pinned, batch.values()))
    if type(batch) is list or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return all(map(can_be_pinned, batch))
    return isinstance(batch, _PLAIN)


def shares_memory(first: Any, second: Any) -> bool:
    """Whether two batches that exist at the same time hold the same memory."""
    return not _addresses(first).isdisjoint(_addresses(second))


def _addresses(batch: Any) -> set[int]:
    arrays = [array for array in parts_of(batch)[1] if _is_dense(array) and array.nbytes]
    of_numpy = {array.__array_interface__["data"][0] for array in arrays if isinstance(array, np.ndarray)}
    return of_numpy | {array.untyped_storage().data_ptr() for array in arrays if isinstance(array, Tensor)}


def _is_dense(array: Array) -> bool:
    return isinstance(array, np.ndarray) or (array.layout == torch.strided and not array.is_nested)


def _same_arrays(first: Any, second: Any) -> bool:
    """Compare two arrays of one type."""
    if isinstance(first, np.ndarray):
        forms = [(array.dtype, array.shape, array.strides) for array in (first, second)]
        return forms[0] == forms[1] and first.tobytes() == second.tobytes()
    forms = [(t.dtype, t.shape, t.layout, t.device, t.requires_grad) for t in (first, second)]
    if forms[0] != forms[1] or first.layout != torch.strided or first.is_quantized:
        return False
    if first.stride() != second.stride():
        return False
    if not first.numel():
        return True
    one, two = (t.detach().as_subclass(Tensor).resolve_conj().resolve_neg() for t in (first, second))
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two)))
