"""Send a data set to worker processes: its structure as a pickle, its large and immutable parts by reference."""

from __future__ import annotations

import hashlib
import io
import pickle
import zlib
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchboost.data.draws import KINDS, generators_behind, is_of_process, state_of

MOST_BYTES = 256 * 2**20
"""Bytes of the structure of a data set, which every worker gets a copy of."""
MOST_HASHED = 64 * 2**20
"""Bytes of tensors and arrays that are read to see whether they have changed."""
_LONG = 1000
_ATOMS = {str, int, float, bool, bytes, type(None)}


class Unfit(Exception):
    """A loader cannot be read by workers. The message is the reason, as a clause."""


@dataclass(frozen=True)
class Packed:
    """Objects that a forked worker builds again, so that open files and locks are not shared with it unnoticed.

    By reference they hold tensors, arrays, functions, classes, generators and long lists of plain values.
    """

    pickled: bytes  # their structure
    held: list[Any]  # what they hold by reference
    generators: list[Any]  # the random ones among these, and those that functions among them reach by a global name
    version: str | None  # changes with their contents; None if they are too large to tell

    def unpack(self) -> Any:
        """Return the objects."""
        return _Unpacker(self).load()


def pack(value: Any) -> Packed:
    """Pack an object for a worker that is forked from this process, or raise :class:`Unfit`.

    It may hold no tensor on another device, no structure of more than 256 MiB, and nothing that cannot be sent to
    another process, such as an open file or a lock.
    """
    sink = _Sink()
    packer = _Packer(sink)
    try:
        packer.dump(value)
        packer.check_closures()
        known = set(map(id, packer.generators))
        packer.generators += [each for each in generators_behind(packer.held) if id(each) not in known]
    except Unfit:
        raise
    except Exception as error:
        text = str(error).partition("\n")[0] or type(error).__name__
        raise Unfit(f"the data set, or its collate_fn, cannot be sent to another process ({text})") from None
    return Packed(sink.getvalue(), packer.held, packer.generators, packer.version(sink))


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: Packed) -> None:
        super().__init__(io.BytesIO(packed.pickled))
        self._held = packed.held

    def persistent_load(self, pid: Any) -> Any:
        return self._held[pid]


class _Sink(io.BytesIO):
    def write(self, part: Any) -> int:
        if self.tell() + len(part) > MOST_BYTES:
            raise Unfit(f"a copy of the data set takes more than {MOST_BYTES >> 20} MiB in each worker")
        return super().write(part)


class _Packer(pickle.Pickler):
    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, protocol=pickle.HIGHEST_PROTOCOL)
        self.held: list[Any] = []
        self.generators: list[Any] = []
        self._places: dict[int, int] = {}
        self._functions: list[FunctionType] = []

    def persistent_id(self, obj: Any) -> Any:
        if not self._is_held(obj):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.held)
            self.held.append(obj)
            if isinstance(obj, FunctionType):
                self._functions.append(obj)
            if isinstance(obj, KINDS) and not is_of_process(obj):
                self.generators.append(obj)
        return self._places[id(obj)]

    def _is_held(self, obj: Any) -> bool:
        kind = type(obj)
        if kind in (str, int, dict, tuple):
            return False
        if kind is list:
            return len(obj) >= _LONG and _ATOMS.issuperset(map(type, obj))
        if isinstance(obj, Tensor):
            if obj.device.type != "cpu":
                raise Unfit(f"the data set holds a tensor on {obj.device}")
            return True
        if isinstance(obj, np.ndarray):
            return not obj.dtype.hasobject
        if isinstance(obj, bytes):
            return len(obj) >= _LONG
        return isinstance(obj, (type, FunctionType, ModuleType, BuiltinFunctionType, *KINDS)) and not _is_method(obj)

    def check_closures(self) -> None:
        """Pack the closures and defaults of functions, to see that they can be sent too."""
        for function in self._functions:  # which grows
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
            self.dump((cells, function.__defaults__, function.__kwdefaults__))

    def version(self, sink: _Sink) -> str | None:
        """Return a checksum of the packed object, or None if it is too large."""
        arrays = [obj for obj in self.held if isinstance(obj, (Tensor, np.ndarray))]
        try:
            if sum(array.nbytes for array in arrays) > MOST_HASHED:
                return None
            contents = [(id(obj), _checksum(obj)) for obj in self.held]
        except (RuntimeError, TypeError, ValueError):  # a tensor without plain memory
            return None
        return hashlib.sha256(sink.getvalue() + repr(contents).encode()).hexdigest()


def _checksum(obj: Any) -> Any:
    if isinstance(obj, Tensor):
        obj = obj.detach().contiguous().view(-1).view(torch.uint8).numpy()
    if isinstance(obj, np.ndarray):
        return zlib.crc32(obj.tobytes())
    if isinstance(obj, KINDS):
        return None if is_of_process(obj) else state_of(obj)
    return hash(tuple(obj) if isinstance(obj, list) else obj) if isinstance(obj, (list, bytes)) else 0


def _is_method(obj: Any) -> bool:
    """Whether a built-in function belongs to an object, which is then packed."""
    return isinstance(obj, BuiltinFunctionType) and not isinstance(obj.__self__, (ModuleType, type, type(None)))
