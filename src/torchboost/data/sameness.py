"""Whether two batches are equal bit for bit, and what memory a batch holds."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["arrays_in", "bytes_of", "can_be_pinned", "same", "shares_memory"]

_PLAIN = (str, bytes, bytearray, int, bool, complex, type(None))


def same(first: Any, second: Any) -> bool:
    """Whether two batches have the same types, the same structure and the same bits.

    Tensors are compared with their strides, NaN equals NaN of the same bits, and 0.0 differs from -0.0. Objects of
    other types are compared by their attributes, or by ``==`` if they have none.

    Example:
        >>> import torch
        >>> same({"x": torch.tensor([0.0])}, {"x": torch.tensor([-0.0])})
        False
    """
    try:
        return _same(first, second)
    except Exception:  # an object with rules of its own, or one that contains itself
        return False


def arrays_in(value: Any, depth: int = 20) -> Iterator[Tensor | np.ndarray]:
    """Yield the tensors and arrays of a batch, to a limited depth."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif depth and not isinstance(value, _PLAIN):
        if isinstance(value, dict):
            inner: Any = value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            inner = value
        else:
            inner = list(_attributes(value).values())
        for each in inner:
            yield from arrays_in(each, depth - 1)


def bytes_of(batch: Any) -> int:
    """Return how many bytes the dense tensors and the arrays of a batch hold."""
    return sum(array.nbytes for array in arrays_in(batch) if _is_dense(array))


def can_be_pinned(batch: Any) -> bool:
    """Whether torch keeps the types of a batch if it copies it to pinned memory. It makes lists of tuples."""
    if isinstance(batch, Tensor):
        return batch.device.type == "cpu" and _is_dense(batch)
    if type(batch) is dict:
        return all(map(can_be_pinned, batch.values()))
    if type(batch) is list or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        return all(map(can_be_pinned, batch))
    return isinstance(batch, _PLAIN) or type(batch) is float


def shares_memory(first: Any, second: Any) -> bool:
    """Whether two batches that exist at the same time hold the same memory."""
    return not _addresses(first).isdisjoint(_addresses(second))


def _addresses(batch: Any) -> set[int]:
    return {_address(array) for array in arrays_in(batch) if _is_dense(array) and array.nbytes}


def _address(array: Tensor | np.ndarray) -> int:
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    return array.untyped_storage().data_ptr()


def _is_dense(array: Tensor | np.ndarray) -> bool:
    return isinstance(array, np.ndarray) or (array.layout == torch.strided and not array.is_nested)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return _same_tensors(first, second)
    if isinstance(first, (np.ndarray, np.generic)):
        return _same_arrays(np.asarray(first), np.asarray(second))
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    if isinstance(first, _PLAIN):
        return first == second
    if isinstance(first, dict):
        keys = list(first)
        return (
            keys == list(second) and all(_same(first[key], second[key]) for key in keys) and _same_extras(first, second)
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_same, first, second)) and _same_extras(first, second)
    mine = _attributes(first)
    return _same(mine, _attributes(second)) if mine else bool(first == second)


def _same_extras(first: Any, second: Any) -> bool:
    """Whether the attributes of two containers are equal: classes may add some to a list or a dict."""
    mine, other = getattr(first, "__dict__", None), getattr(second, "__dict__", None)
    return mine == other if not mine or not other else _same(mine, other)


def _same_tensors(first: Tensor, second: Tensor) -> bool:
    kinds = [(t.dtype, t.shape, t.layout, t.device, t.requires_grad) for t in (first, second)]
    if kinds[0] != kinds[1]:
        return False
    if first.layout != torch.strided or first.is_quantized:
        return False
    if first.stride() != second.stride() or not _same_extras(first, second):
        return False
    if not first.numel():
        return True
    one, two = (t.detach().as_subclass(Tensor).resolve_conj().resolve_neg() for t in (first, second))
    return torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two)))


def _same_arrays(first: np.ndarray, second: np.ndarray) -> bool:
    if (first.dtype, first.shape, first.strides) != (second.dtype, second.shape, second.strides):
        return False
    if first.dtype.hasobject:
        return all(map(_same, first.reshape(-1).tolist(), second.reshape(-1).tolist()))
    return first.tobytes() == second.tobytes()
