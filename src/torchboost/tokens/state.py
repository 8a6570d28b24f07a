"""What a forward pass writes to besides its results, so that a pass that is given up leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from torchboost.core.contents import CONTAINERS, GENERATORS, Way, same_numbers
from torchboost.core.forward import tensors_in
from torchboost.core.torch_private import buffer_slots, parameter_slots, version
from torchboost.tokens.reach import OF_MODULES, WAYS, Place, attributes_of, reached_by_hooks, with_inner
from torchboost.tokens.rows import Rows

Key = tuple[int, str]
"""The number of a module and the name of its parameter or buffer.

Or the number of an input and an empty name, or of a tensor that hooks name and ``_OF_HOOKS``.
"""
_OF_HOOKS = "."


_LASTING: Any = WeakIdKeyDictionary()
"""Tensor -> its versions before and after writes that last."""


def let_last(tensor: Tensor, before: int) -> None:
    """Do not count what was written to a tensor since version ``before``: a repeated pass would not write it again."""
    first, last = _LASTING.get(tensor, (before, before))
    _LASTING[tensor] = (first if last == before else before, version(tensor))


def is_written(tensor: Tensor, then: int) -> bool:
    """Whether a tensor was written to since a version, apart from writes that last."""
    first, last = _LASTING.get(tensor, (then, then))
    return version(tensor) != (last if first <= then <= last else then)


class State:
    """Attributes and tensors of the modules of a model, and tensors, dicts and lists among the inputs of a call.

    Containers and random generators that attributes name are included, with the containers in these, and so are
    variables, objects and tensors that forward hooks name, or that are in ``places``. The numbers of ``moving`` tensors
    are copied. None copies all tensors but parameters.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, moving: Set[Key] | None = None, places: Iterable[Place] = ()
    ) -> None:
        modules = [*model.modules()]
        self._attributes = [(vars(module), dict(vars(module))) for module in modules]
        named = [values[name] for _, values in self._attributes for name in values.keys() - OF_MODULES]
        reached = [*(owner.get(name) for owner, name in places), *reached_by_hooks(modules)]
        once = {id(one): one for one in (*named, *_entries(inputs), *reached)}
        objects = {id(one): found for one in once.values() if (found := attributes_of(one))}
        self._attributes += [(vars(once[key]), dict(vars(once[key]))) for key in objects]
        named += [*reached, *(value for found in objects.values() for value in found.values())]
        self._containers, self._generators = _contents(with_inner(named), WAYS), _contents(named, GENERATORS)
        slots: list[dict[str, Any]] = [*map(buffer_slots, modules)]
        self._slots = [(each, dict(each)) for each in slots if each]
        slots = [*map(parameter_slots, modules)]
        self._attributes += [(each, dict(each)) for each in slots if each]  # after the call, a loop may have set others
        tensors: dict[Key, Tensor] = {(place, ""): tensor for place, tensor in enumerate(whole_tensors_in(inputs))}
        tensors |= {(place, _OF_HOOKS): one for place, one in enumerate(reached) if type(one) is Tensor}
        tensors |= _named(map(buffer_slots, modules))
        self._first = moving is None
        copied = tensors.keys() if moving is None else moving
        tensors |= _named(map(parameter_slots, modules))
        self._numbers = {key: tensors[key].detach().clone() for key in copied if key in tensors}
        self._tensors = {key: (tensor, version(tensor)) for key, tensor in tensors.items()}
        gradients = [(weight, weight.grad) for weight in model.parameters() if weight.is_leaf]
        self._gradients = [(weight, one, 0 if one is None else version(one)) for weight, one in gradients]
        self._given = _contents(_containers_in(inputs), CONTAINERS)

    def moved(self) -> frozenset[Key]:
        """Return which tensors have been written to since. If all are copied, numbers count, too, not only versions."""
        moved = {key for key, (tensor, then) in self._tensors.items() if is_written(tensor, then)}
        return frozenset(moved | self._other_numbers() if self._first else moved)

    def _other_numbers(self) -> set[Key]:
        """Return which copied tensors differ from their copies: what is written through ``data`` has no version."""
        pairs = {key: self._tensors[key][0].detach() for key in self._numbers.keys() & self._tensors.keys()}
        return {key for key, tensor in pairs.items() if _differs(tensor, self._numbers[key])}

    def leave_attributes(self) -> None:
        """Restore no attributes from now on, nor keep what they and hooks named."""
        self._attributes, self._containers, self._gradients = [], [], []
        for key in [key for key in self._tensors if key[1] == _OF_HOOKS]:
            del self._tensors[key]

    def set_gradients_aside(self) -> None:
        """Let backward passes inside of the model begin without gradients, until this is restored."""
        for weight, *_ in self._gradients:
            weight.grad = None

    def restore(self) -> bool:
        """Restore everything that can be. Return whether this is all.

        Parameters, numbers of gradients that were there, and graphs of inputs, may not be.
        """
        for slots, entries in (*self._attributes, *self._slots):
            for name in slots.keys() - entries.keys():
                del slots[name]
            slots.update(entries)
        for one, write, contents in (*self._given, *self._containers, *self._generators):
            write(one, contents)
        for weight, gradient, _ in self._gradients:
            weight.grad = gradient
        added = any(gradient is not None and version(gradient) != then for _, gradient, then in self._gradients)
        moved = self.moved() | self._other_numbers()
        with torch.no_grad():
            for key in moved & self._numbers.keys():  # a graph may hold the others
                self._tensors[key][0].copy_(self._numbers[key])
        return (
            not added and moved <= self._numbers.keys() and all(self._tensors[key][0].grad_fn is None for key in moved)
        )


def whole_tensors_in(inputs: Any) -> list[Tensor]:
    """Return the tensors among inputs, without those of another model that skips positions."""
    return [tensor for tensor in tensors_in(inputs) if not isinstance(tensor, Rows)]


def _contents(things: Iterable[Any], ways: Mapping[type, Way]) -> list[tuple[Any, Callable[[Any, Any], object], Any]]:
    """Return the things of exactly these classes, how each is written to, and what it has now."""
    return [(one, way[1], way[0](one)) for one in things if (way := ways.get(type(one)))]


def _differs(one: Tensor, other: Tensor) -> bool:
    readable = one.layout is torch.strided and not (one.is_meta or one.is_nested) and one.shape == other.shape
    return readable and not same_numbers(one, other)


def _entries(inputs: tuple[Any, Any]) -> list[Any]:
    args, kwargs = inputs
    return [*args, *kwargs.values()]


def _containers_in(inputs: tuple[Any, ...]) -> list[Any]:
    """Return the dicts and lists among inputs. Objects of classes derived from them may refuse to be written to."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [inputs]
    while waiting:
        one = waiting.pop()
        if id(one) not in found:
            found[id(one)] = one
            entries = one.values() if type(one) is dict else one
            waiting += [entry for entry in entries if type(entry) in (dict, list, tuple)]
    return [one for one in found.values() if type(one) is not tuple]


def _named(slots: Iterable[Mapping[str, Tensor | None]]) -> dict[Key, Tensor]:
    each = ((place, name, tensor) for place, named in enumerate(slots) for name, tensor in named.items())
    return {(place, name): tensor for place, name, tensor in each if tensor is not None}
