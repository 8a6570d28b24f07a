"""``requires_grad`` of parameters that are frozen for a while, given back as it was found."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["HeldFlags", "SettledNorms", "release_others"]

Owner = Callable[[], Any]


class HeldFlags:
    """The parameters whose flags were cleared here, and only those.

    A parameter that somebody else has frozen is not held and never thawed. One that somebody else thaws while it is
    held is left to them from then on. What cannot be seen: a second ``requires_grad_(False)`` on a parameter that is
    held; it is thawed with the others.

    Args:
        owner: Has ``remove()``; called where another owner takes the same parameters over. Held weakly.
        parameters: That may be held.
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
        """Hold exactly those of ``wanted`` that train now, and give all others back."""
        after = {id(parameter): parameter for parameter in wanted}
        for key, parameter in list(self.held.items()):
            if parameter.requires_grad:  # thawed by somebody else
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
        """Whether a parameter trains but for what is held here."""
        return parameter.requires_grad or id(parameter) in self.held


class SettledNorms:
    """BatchNorms that were put into eval mode here, and only those."""

    def __init__(self) -> None:
        self._ours: set[_BatchNorm] = set()

    def settle(self, norms: Iterable[_BatchNorm]) -> None:
        """Put norms into eval mode; those that are in it already stay somebody else's."""
        for norm in norms:
            if norm.training:
                norm.training = False
                self._ours.add(norm)

    def give_back(self, norms: Iterable[_BatchNorm], model: nn.Module) -> None:
        """Give those that were put into eval mode here the mode of the model again."""
        for norm in self._ours.intersection(norms):
            norm.training = model.training
            self._ours.discard(norm)


def release_others(parameters: Iterable[Tensor]) -> None:
    """Take parameters over from an earlier owner: it is removed, and what it left frozen is thawed.

    An owner goes with its optimizer, and then nobody else would give the flags back.
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
    """What is known of an owner for as long as its parameters live, which may be longer than it does."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.held: set[int] = set()  # ids of parameters that lead here and so live


# Flags outlive whoever cleared them: nothing else tells a parameter that freezing left behind from one that the user
# froze. An entry goes when its parameter goes.
_RECORDS: Any = WeakIdKeyDictionary()
