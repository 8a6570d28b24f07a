"""The tensors of one group in one step, and which of their gradients were checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from torchboost.optim.tensors import aligned

__all__ = ["Batch", "Checked"]

_DTYPE, _LAYOUT, _DEVICE = attrgetter("dtype"), attrgetter("layout"), attrgetter("device")


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

    def select(self, places: Sequence[int]) -> Batch:
        """Return the batch of some of the parameters, by position."""
        params, grads, states = self.params, self.grads, self.states
        return Batch([params[at] for at in places], [grads[at] for at in places], [states[at] for at in places])

    def align(self, keys: Sequence[str]) -> None:
        """Give gradients and the entries ``keys`` of the states the memory layout of their parameter.

        Kernels that read memory in order would read them at the wrong places.
        """
        layout = _strides(self.params) if self.layout is None else self.layout
        if _strides(self.grads) != layout:
            self.grads[:] = [aligned(grad, param) for grad, param in zip(self.grads, self.params, strict=True)]
        for key in keys:
            entries = [state.get(key) for state in self.states]
            present = [entry for entry in entries if entry is not None]
            if len(present) == len(entries) and _strides(present) == layout:
                continue
            for entry, param, state in zip(entries, self.params, self.states, strict=True):
                if entry is not None:
                    state[key] = aligned(entry, param)


class Checked:
    """A record, per group, of the options and of the parameters whose dense gradients passed the checks.

    The options of a group count as checked while its entries are the same objects, its gradients until a flag of the
    group or what :func:`_facts` returns changes.
    """

    def __init__(self) -> None:
        self._options: dict[int, tuple[list[Any], list[Any]]] = {}
        self._gradients: dict[int, tuple[list[Tensor], tuple[Any, ...]]] = {}

    def options(self, number: int, group: Mapping[str, Any], check: Callable[[Mapping[str, Any]], None]) -> None:
        """Check the options of a group, unless they are those that were checked last."""
        if torch.compiler.is_compiling():
            return check(group)
        values, flags = self._options.get(number, ([], []))
        if len(values) == len(group) and all(map(is_, values, group.values())):
            return
        check(group)
        # Whether a gradient is usable may depend on whether a number is 0, but not on the number.
        plain = (bool, int, float, type(None))
        now = [(k, type(v), bool(v) if isinstance(v, plain) else None) for k, v in group.items() if k != "params"]
        if now != flags:
            self._gradients.pop(number, None)
        self._options[number] = list(group.values()), now

    def layout(self, number: int, params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[tuple[int, ...]] | None:
        """Return the strides of the parameters if the record covers these gradients, else None."""
        if torch.compiler.is_compiling() or number not in self._gradients:
            return None
        _, facts = self._gradients[number]
        return facts[1] if facts == _facts(params, grads) else None

    def note(self, number: int, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        """Record that all of these gradients were checked, unless they are of several kinds or sparse."""
        self._gradients.pop(number, None)
        if torch.compiler.is_compiling() or any(type(param) not in (Tensor, torch.nn.Parameter) for param in params):
            return  # tensor subclasses may change what they hold in other ways
        facts = _facts(params, grads)
        if facts[4] == {torch.strided} and len(facts[2]) == len(facts[3]) == 1:
            self._gradients[number] = list(params), facts  # kept alive, so that their ids are not reused


def _facts(params: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return what can differ from step to step: parameters, their strides and devices, kinds of gradients."""
    kinds = set(map(_DEVICE, params)), set(map(_DTYPE, grads)), set(map(_LAYOUT, grads))
    return list(map(id, params)), _strides(params), *kinds


def _strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    return list(map(Tensor.stride, tensors))
