"""Clear ``requires_grad`` of parameters and restore it later."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchboost.core.torch_private import AnyBatchNorm

__all__ = ["HeldFlags", "SettledNorms", "release_others"]

Owner = Callable[[], Any]


class HeldFlags:
    """Freezes parameters (``requires_grad=False``) and remembers which ones, so that only these are thawed.

    A parameter that other code has frozen is not held and never thawed. If other code thaws a held parameter, it is no
    longer held. A second ``requires_grad_(False)`` on a held parameter cannot be detected; it is thawed with the
    others.

    Args:
        owner: Has ``remove()``, which is called if another owner takes over the same parameters. Held weakly.
        parameters: Parameters that may be held.
    """

    def __init__(self, owner: Any, parameters: Iterable[Tensor]) -> None:
        self.held: dict[int, Tensor] = {}
        """By ``id``: hashing a tensor costs ten times as much as hashing a number."""
        self._left: set[int] = set()
        self._record = _Record(weakref.ref(owner))
        self._known: set[int] = set()
        self._register(parameters)

    def _register(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                _RECORDS[parameter] = self._record

    def change(self, wanted: Iterable[Tensor]) -> None:
        """Hold exactly those of ``wanted`` that train now, and release all others."""
        after = {id(parameter): parameter for parameter in wanted}
        for key, parameter in list(self.held.items()):
            if parameter.requires_grad:  # thawed by other code
                self._left.add(key)
            elif key not in after:
                parameter.requires_grad_(True)
            else:
                continue
            del self.held[key]
            self._record.held.discard(key)
        self._register(after.values())
        for key, parameter in after.items():
            if key not in self.held and key not in self._left and parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.grad = None
                self.held[key] = parameter
                self._record.held.add(key)

    def may_train(self, parameter: Tensor) -> bool:
        """Whether a parameter would train if nothing were held here."""
        return parameter.requires_grad or id(parameter) in self.held


class SettledNorms:
    """BatchNorms that were put into eval mode here, and only those."""

    def __init__(self) -> None:
        self._ours: set[AnyBatchNorm] = set()

    def settle(self, norms: Iterable[AnyBatchNorm]) -> None:
        """Put norms into eval mode; those already in eval mode are not tracked."""
        for norm in norms:
            if norm.training:
                norm.training = False
                self._ours.add(norm)

    def give_back(self, norms: Iterable[AnyBatchNorm], model: nn.Module) -> None:
        """Restore the model's mode for the norms that were put into eval mode here."""
        for norm in self._ours.intersection(norms):
            norm.training = model.training
            self._ours.discard(norm)


def release_others(parameters: Iterable[Tensor]) -> None:
    """Take over parameters from an earlier owner: remove it and thaw what it left frozen.

    If an optimizer is deleted, its freezing goes with it, and its parameters would stay frozen. They are thawed here.
    """
    for parameter in parameters:
        record = _RECORDS.pop(parameter, None)
        if record is None:
            continue
        owner = record.owner()
        if owner is not None:
            owner.remove()
        if id(parameter) in record.held:
            parameter.requires_grad_(True)


class _Record:
    """Record of an owner that lives as long as its parameters, even if the owner does not."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.held: set[int] = set()  # ids of parameters that map to this record, so they are alive


# Flags outlive their owner. Only this table tells a parameter that freezing left frozen from one that the user froze.
# An entry is dropped with its parameter.
_RECORDS: Any = WeakIdKeyDictionary()
