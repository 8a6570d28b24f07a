"""Count what makes the host wait for the device."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Waits"]

_SIZED_BY_NUMBERS = ("nonzero", "masked_select", "unique", "_unique", "bincount", "repeat_interleave.Tensor", "equal")


class Waits(TorchDispatchMode):
    """A context that counts the operators for whose result the host waits, by the line of the package that ran them.

    They read a number, copy to the host, or make a tensor whose size depends on numbers of the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """How often the host waited."""
        return sum(self.seen.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if self._waits(str(func).removeprefix("aten."), (*args, *(kwargs or {}).values()), made):
            self.seen[f"{func} at {_line()}"] += 1
        return made

    @staticmethod
    def _waits(name: str, args: Any, made: Any) -> bool:
        first = args[0] if args else None
        if name.startswith(("copy_", "_foreach_copy_")) and args[2:] == (True,):  # non_blocking
            return False
        if name.startswith("copy_"):
            return not _on_device(first) and _on_device(args[1])
        if name.startswith("_to_copy"):
            return not _on_device(made) and _on_device(first)
        if name.startswith("_foreach_copy_"):
            return any(not _on_device(a) and _on_device(b) for a, b in zip(args[0], args[1], strict=True))
        if name.startswith("index.Tensor"):
            return any(_on_device(index) and index.dtype is torch.bool for index in args[1])
        return _on_device(first) and name.startswith(("_local_scalar_dense", *_SIZED_BY_NUMBERS))


def _on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


def _line() -> str:
    """Return the innermost line of the package on the stack, otherwise of torch."""
    frames = [f for f in reversed(traceback.extract_stack()) if f.filename != __file__ and "_python_" not in f.filename]
    own = [f for f in frames if "/src/torchboost/" in f.filename]
    return f"{(own or frames)[0].filename}:{(own or frames)[0].lineno}"
