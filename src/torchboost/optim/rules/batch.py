"""The tensors of one group in one step, and which of their gradients were checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from torchboost.optim.tensors import aligned

__all__ = ["Batch", "Checked", "strides"]

_DTYPE, _LAYOUT, _DEVICE = attrgetter("dtype"), attrgetter("layout"), attrgetter("device")

_Record = tuple[list[Tensor], list[int], list[tuple[int, ...]], torch.dtype, torch.device, list[Any], list[Any]]


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the strides of all tensors, without a Python loop."""
    return list(map(Tensor.stride, tensors))


@dataclass(slots=True)
class Batch:
    """The parameters of a group that have a gradient, as parallel lists.

    Args:
        params: The tensors to update in place: the parameters, or their float32 masters.
        grads: Their gradients, in the precision of ``params``.
        states: Their states.
        layout: Strides of ``params``, if already known.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    layout: list[tuple[int, ...]] | None = None

    def state(self, key: str) -> list[Tensor]:
        """Return one entry of all states."""
        return [state[key] for state in self.states]

    def align(self, keys: Sequence[str]) -> None:
        """Give gradients and the entries ``keys`` of the states the memory layout of their parameter.

        Kernels that read memory in order would read them at the wrong places.
        """
        wanted = strides(self.params) if self.layout is None else self.layout
        if strides(self.grads) != wanted:
            self.grads[:] = [aligned(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]
        for key in keys:
            entries = [state.get(key) for state in self.states]
            present = [entry for entry in entries if entry is not None]
            if len(present) == len(entries) and strides(present) == wanted:
                continue
            for entry, param, state in zip(entries, self.params, self.states, strict=True):
                if entry is not None:
                    state[key] = aligned(entry, param)


class Checked:
    """A record, per group, of the parameters whose dense gradients of one precision passed the checks.

    A record is valid until the parameters of the group, their strides or devices, or a flag of the group change. What
    can differ from step to step is checked in every step: precision and layout of the gradients, and the device. The
    options of a group count as checked while its entries are the same objects.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._options: dict[int, list[Any]] = {}

    def options(self, number: int, group: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]) -> None:
        """Check the options of a group, unless they are those that were checked last."""
        if torch.compiler.is_compiling():
            check(group)
        elif not _same(self._options.get(number, ()), group):
            self._options.pop(number, None)
            check(group)
            self._options[number] = list(group.values())

    def layout(
        self, number: int, group: Mapping[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> list[tuple[int, ...]] | None:
        """Return the strides of the parameters if the record covers these gradients, else None."""
        record = None if torch.compiler.is_compiling() else self._records.get(number)
        if record is None:
            return None
        _, ids, memory, dtype, device, values, flags = record
        holds = (
            ids == list(map(id, params))
            and _one(_DTYPE, grads) is dtype
            and _one(_DEVICE, params) == device
            and _one(_LAYOUT, grads) is torch.strided
            and memory == strides(params)
            and (_same(values, group) or flags == _flags(group))
        )
        return memory if holds else None

    def note(self, number: int, group: Mapping[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Record that all of these gradients were checked."""
        self._records.pop(number, None)
        if torch.compiler.is_compiling() or any(type(param) not in (Tensor, torch.nn.Parameter) for param in params):
            return  # tensor subclasses may change what they hold in other ways
        dtype, device = _one(_DTYPE, grads), _one(_DEVICE, params)
        if dtype is not None and device is not None and _one(_LAYOUT, grads) is torch.strided:
            # The record keeps the parameters alive, so that their ids are not reused.
            now = list(group.values()), _flags(group)
            self._records[number] = (list(params), list(map(id, params)), strides(params), dtype, device, *now)


def _same(values: Sequence[Any], group: Mapping[str, Any]) -> bool:
    """Whether the entries of a group are these objects, in this order."""
    return len(values) == len(group) and all(map(is_, values, group.values()))


def _one(of: attrgetter[Any], tensors: Sequence[Tensor]) -> Any:
    """Return the value that all tensors have in common, or None."""
    found = set(map(of, tensors))
    return found.pop() if len(found) == 1 else None


def _flags(group: Mapping[str, Any]) -> list[Any]:
    """Return the options that may decide whether a gradient is usable; for numbers, only whether they are 0."""
    return [
        (key, type(value), bool(value) if isinstance(value, (bool, int, float, type(None))) else None)
        for key, value in group.items()
        if key != "params"
    ]
